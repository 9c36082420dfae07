"""Views of a run: the HTML report, the live table, and the page of a running cluster."""

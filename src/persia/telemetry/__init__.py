"""What can be seen of a run: live line and TensorBoard (`live`), figures of every role (`figures`), Prometheus.

Import the modules; this one imports none, as parameter servers start without a terminal or a web server.
"""

"""Gives msgspec records a signature in the API reference: their fields, as for dataclasses."""

from typing import Any

import griffe


class Structs(griffe.Extension):
    """Adds `__init__` to classes that derive from `msgspec.Struct`."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Runs when a class has been read."""
        bases = {str(base).rsplit(".", 1)[-1] for base in cls.bases}
        if not bases & {"Struct", "_Record"} or "__init__" in cls.members:
            return
        fields = [a for a in cls.members.values() if a.is_attribute and "instance-attribute" in a.labels]
        if not fields:
            return
        positional = griffe.ParameterKind.positional_or_keyword
        parameters = [griffe.Parameter("self", kind=positional)]
        for field in fields:
            parameters.append(
                griffe.Parameter(field.name, annotation=field.annotation, kind=positional, default=field.value)
            )
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters)))

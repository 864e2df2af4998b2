"""The line with which the router says where it listens."""

from pydantic import BaseModel, ConfigDict, ValidationError

from trimtab.local.processes import StartError


class RouterPorts(BaseModel):
    """The router's ports; behind a door it has none for callers."""

    model_config = ConfigDict(frozen=True)

    rest_port: int
    admin_port: int

    @classmethod
    def parse(cls, line: bytes) -> "RouterPorts":
        """Read the line; raises StartError where it is another."""
        try:
            return cls.model_validate_json(line)
        except ValidationError:
            raise StartError(f"the router said {line[:80]!r}; expected its ports") from None

"""Settings for child processes: in the environment, since a command line is seen by every user of the machine."""

from overnight.core.settings import PREFIX, Settings


def settings_environment(settings: Settings) -> dict[str, str]:
    """``OVERNIGHT_*`` variables from which a child builds the same settings. The client's token is left out."""
    values = settings.model_dump(exclude={"token", "server"}, exclude_none=True, mode="json")
    return {PREFIX + name.upper(): str(value) for name, value in values.items()}

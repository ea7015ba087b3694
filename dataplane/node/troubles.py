"""What is wrong with a running node right now, by concern; the log hears of each trouble once, and of its end."""

import logging

log = logging.getLogger(__name__)


class Troubles:
    """The troubles that the node goes on with. Each has a concern, a short name such as ``device``."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def note(self, concern: str, text: str | None) -> None:
        """`concern` is troubled by `text` now, or by nothing (any more). Logs it if that is news."""
        before = self._texts.get(concern)
        if text == before:
            return
        if text is None:
            del self._texts[concern]
            log.info("%s: in order again (it was: %s)", concern, before)
        else:
            self._texts[concern] = text
            log.error("%s: %s", concern, text)

    def report(self) -> list[str]:
        """The troubles, for status; from any thread."""
        return [text for _, text in sorted(self._texts.copy().items())]

    def __contains__(self, concern: str) -> bool:
        return concern in self._texts

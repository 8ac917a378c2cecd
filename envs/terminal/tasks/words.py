"""Words that tasks draw names and text from. Knows no task. None is the beginning of another in its list."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = _words("ada bruno chen dalia emeka farah gita hugo ines jonas keiko lars mira noor otto priya rosa")
PLACES = _words("amman bergen cusco dakar esbjerg fukuoka gdansk hanoi izmir jaipur kigali lyon malmo nantes")
SERVICES = _words("auth billing cache gateway indexer ledger mailer notify queue report search sync")
WORDS = _words(
    "amber birch cedar dune ember fjord grove hazel iris jade kelp lotus maple nectar opal pearl quartz reed slate "
    "thorn umber velvet willow yarrow zephyr"
)

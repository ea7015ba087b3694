"""Go's spelling of flags, so that a command line written for flanneld works.

Go's ``flag`` package takes one dash or two before a name, and ``=true`` or ``=false`` behind a boolean. Click takes two
dashes, and boolean options without a value. `normalize` rewrites the first spelling into the second and touches nothing
that Click would understand by itself.
"""

from collections.abc import Collection, Mapping, Sequence


def normalize(arguments: Sequence[str], options: Collection[str], booleans: Mapping[str, str | None]) -> list[str]:
    """`arguments` in Click's spelling.

    `options` are the long names without dashes; `booleans` maps those among them that take no value to the option that
    says the opposite, or None. What follows a lone ``--`` stays as it is.
    """
    out: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*out, argument, *rest]
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in options:
            if name in booleans and equals and value.lower() in _TRUTH:
                wanted = name if _TRUTH[value.lower()] else booleans[name]
                out += [f"--{wanted}"] if wanted else []
            else:
                out.append(f"--{name}{equals}{value}")
        else:
            out.append(argument)
    return out


_TRUTH = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}

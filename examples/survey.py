"""A survey of a source tree: read and grep all of it, hand back three lines.

Run by `make demo` with the standard library as the working directory.  The helpers are pre-imported.
"""

import re

packages = [
    line.split("/")[0]
    for line in find("__init__.py", max_results=1000).splitlines()[2:]
    if line.count("/") == 1
]
hits = grep(r"def \w+_request", glob="*.py", max_results=2000)
handlers = sorted({match[1] for match in re.finditer(r"def (\w+_request)", hits)})
print(f"{len(packages)} packages found, {len(hits)} characters of matches kept here")

# --- next cell
modules = find("*.py", max_depth=1, max_results=1000).splitlines()[2:52]
notify(f"reading {len(modules)} modules of {len(packages)} packages")
sources = [read(modules[0]), *batch([("read", {"path": path}) for path in modules[1:]])]
lines = sum(source.count("\n") + 1 for source in sources)
longest = max(zip(modules, sources), key=lambda pair: len(pair[1]))

text(f"{len(packages)} packages; {len(modules)} modules read, {lines} lines of source seen")
text(f"{len(handlers)} functions named *_request, for example {', '.join(handlers[:3])}")
text(f"the longest of those modules is {longest[0]}, {len(longest[1])} characters")

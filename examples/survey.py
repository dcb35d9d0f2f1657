"""A survey of a source tree: read and grep all of it, hand back three lines.

Run by `make demo` with the standard library as the working directory.  The helpers are pre-imported.
"""
import re

packages = [line.split("/")[0] for line in find("__init__.py", max_results=1000).splitlines()[2:] if line.count("/") == 1]
hits = grep(r"def \w+_request", glob="*.py", max_results=2000)
handlers = {match[1] for match in re.finditer(r"def (\w+_request)", hits)}

modules = [line for line in find("*.py", max_depth=1, max_results=1000).splitlines()[2:]][:50]
notify(f"reading {len(modules)} modules of {len(packages)} packages")
sources = batch([("read", {"path": path}) for path in modules])
lines = sum(source.count("\n") + 1 for source in sources)
longest = max(zip(modules, sources), key=lambda pair: len(pair[1]))

text(f"{len(packages)} packages; {len(modules)} modules read, {lines} lines of source seen")
text(f"{len(handlers)} functions named *_request, for example {', '.join(sorted(handlers)[:3])}")
text(f"the longest of those modules is {longest[0]}, {len(longest[1])} characters")

#!/usr/bin/env python3
"""
Find wording that readers stumble over in all tracked Python and Markdown files.

    python .ci/wording.py

It checks every line of Markdown; in Python the comments and all strings with a space. Functions outside the tests must
have docstrings that start with a verb. Exits with code 1 if it finds anything.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path


AMERICAN = "American spelling"
# Pattern between word boundaries -> what to write instead.
PHRASES = {
    # Literal translations.
    r"can not": "cannot",
    r"(?<!there )(?:is|are|was|were) no (?!longer|need|way|reason|gain|limit|one)[a-z]\w+": "is not a ..., has no ...",
    r"(?:goes|go|going|went|gone) on": "continue, resume",
    r"by and by": "gradually",
    r"bit for bit": "bit-identical",
    r"at once": "together, immediately",
    r"for ever": "forever",
    r"(?:that|those) of": "repeat the noun",
    r"(?:is|are|was|were) to be": "must be, will be",
    r"where there (?:is|are)": "if there is",
    r"times as (?:fast|soon|much)": "1.2x faster, in 1.2x fewer steps",
    r"of (?:one's|its|their) own": "its own ..., a separate ...",
    r"(?:is|are|was|were) (?:told|said|asked|meant)": "name the value or the action",
    r"what (?:it|they|there) (?:is|are|was|were)": "name the thing",
    r"asked for": "requested, wanted",
    r"goes before": "overrides",
    r"(?:falls?|fell|fallen|falling) apart": "diverge",
    r"averaged weights": "EMA weights",
    r"data sets?": "dataset",
    r"(?:mend|mends|mended|mending)": "fix",
    r"(?:shall|ought|whilst|amongst|hence|whereby|wherein|therein|thereof|hitherto|beside)": "a plainer word",
    # British spelling.
    r"(?:colour|behaviour|neighbour|favour|honour|centre|grey|licence|catalogue|artefact|analyse)\w*": AMERICAN,
    r"(?:initial|normal|optim|general|special|real|organ|minim|maxim|recogn|token)is(?:e|ing|ation)\w*": AMERICAN,
    r"(?:label|model|cancel|travel)l(?:ed|ing)": "a single l",
}
PATTERN = re.compile("|".join(rf"(\b(?:{phrase})\b)" for phrase in PHRASES), re.IGNORECASE)
# First words of docstrings that are not verbs.
NOT_A_VERB = re.compile(
    r"(?:An?|The|All|Any|Each|Every|Some|One|Two|No|Not|None|This|That|These|Those|It|Its|They|We|What|Whether|Which|Who"
    r"|Where|When|How|Why|As|At|By|For|From|In|Of|On|To|With|Without|Between|Among|Only|Also|If|Is|Are|True|False"
    r"|(?!Pass|Process|Compress|Address|Access|Express|Focus|Discuss)[A-Z][a-z]+s)\b"
)


def tracked_files(root: Path) -> Iterator[Path]:
    """Yield the tracked Python and Markdown files, except this one."""
    command = ["git", "-C", str(root), "ls-files", "-z", "*.py", "*.md"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    yield from (root / name for name in names if name and (root / name).resolve() != Path(__file__).resolve())


def prose(file: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of everything that people read."""
    if file.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT" or (kind in ("STRING", "FSTRING_MIDDLE") and " " in token.string):
            yield from enumerate(token.string.splitlines(), token.start[0])


def docstrings_without_verb(file: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, first word) of docstrings of functions that do not start with a verb."""
    if file.suffix == ".md" or "tests" in file.parts:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not any("property" in ast.dump(mark) for mark in node.decorator_list):
            docstring = ast.get_docstring(node) or ""
            if match := NOT_A_VERB.match(docstring):
                yield node.lineno, match[0]


def findings(file: Path, text: str) -> Iterator[str]:
    """Yield one line for each phrase and docstring to rewrite."""
    advice = list(PHRASES.values())
    for number, line in prose(file, text):
        for match in PATTERN.finditer(line):
            yield f"{file}:{number}: {match[0]!r}: write {advice[match.lastindex - 1]}"
    for number, word in docstrings_without_verb(file, text):
        yield f"{file}:{number}: docstring starts with {word!r}: start with a verb, such as Return"


def main() -> int:
    found = [line for file in tracked_files(Path.cwd()) for line in findings(file, file.read_text(encoding="utf-8"))]
    print("\n".join(found) or "wording: nothing found")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

"""Rules for names, comments and sentences: what a program can find of them.

`python tests/wording.py hopsgpu/agent docs` lists each finding of files or directories;
tests/unit/test_wording.py fails if a kind has more findings than before.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import keyword
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that begin a boolean's name.
BOOLEAN_PREFIXES = _words(
    "is are has have had can could should must may needs was were will did does uses allows"
    " supports exists includes"
)
# Adjectives and nouns that cannot be misread, and names that other libraries give.
CLEAR_BOOLEANS = _words(
    "verbose daemon quiet force strict debug enabled disabled available alive empty complete valid"
    " elastic dry_run exist_ok missing_ok recursive optional required frozen ok full ready kerberos"
    " as_json overwrite follow shuffle drop_last pin_memory secure idle active external terminal"
    " healthy busy durable encrypted trusted independent_ranks trust interactive transient acls"
    " pretty unlimited drop_remainder writeable closed readable seekable atexit"
)
# Functions that act, and return whether they succeeded, begin with one of these verbs.
ACTIONS = _words(
    "release send keep discard abandon decide wait renew load create try take stop rename remove"
    " record replace drop make report put fetch step kill answer sign give prepare run retry"
)
# Words that say nothing of what a variable contains.
VAGUE = _words(
    "there told said begun gone here made given found left taken known come came done own each"
    " one those others another whole"
)
IRREGULAR = _words(
    "told said begun gone made given found left taken known come came done built kept held sent"
    " shown seen written chosen grown drawn lost put cut bound there here meant spent thrown worn"
    " broken lacking standing hidden"
)
PARTICIPLE = re.compile(rf"_*(?:[a-z]+ed|{'|'.join(sorted(IRREGULAR))})")
# Verbs and nouns that end in "ed".
NOT_PARTICIPLES = {"seed", "speed", "feed", "need", "embed", "shed", "proceed", "exceed", "succeed"}
# A context manager reads well as a participle: `with queued(...):`.
CONTEXT_DECORATORS = {"contextmanager", "asynccontextmanager"}
# What a callback that is notified must not be called: `on_<event>` is its form.
VAGUE_CALLBACKS = _words("tell hear say sign drop ask news broken over ready alive")
# A sentence that begins with one of these is inverted, or lacks its subject.
INVERSIONS = re.compile(
    r"(Of|Nor|What|Who|Whoever|Whatever|Whichever|Else|Neither)\b"
    r"|So (is|are|was|does|do|has|have|can)\b"
    r"|To [^,]*$"
)
# Only what stands before in the same comment can say what these are.
PRONOUNS = re.compile(
    r"(It|They|Them|Those|One|He|She|Its|Their|Both|Such|This|These)"
    r"( (is|are|was|were|has|have|had|may|must|can|will|would|does|do|did|of|in|that|which)\b"
    r"|['’,]|$)"
    r"|(It|They|Its|Their|He|She|Them)\b"
)
FINE_STARTS = re.compile(
    r"One (of|line|file|entry|thread|second|rank|process|task|row)\b|Of course\b"
)
MOST_WORDS = 25
# Names of Spark, Hadoop and libraries that comments cite and that no code here uses.
NAMES_OF_OTHERS = _words(
    "AcidUtils DataSourceUtils FileStreamSink HadoopTableOperations InodeTree RebaseDateTime"
    " Storage TFConfigClusterResolver TorchElasticEnvironment _download_hdfs _parse_env_variables"
    " _prepare_backend _save_checkpoint _setup_devices cluster_resolver is_torchelastic_launched"
    " jit ScriptModule set_memory_growth to_pandas_dtype"
)


class Finding(NamedTuple):
    """A place that breaks a rule."""

    kind: str
    path: Path
    line: int
    text: str


def names_of_booleans(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_action = node.name.strip("_").split("_")[0] in ACTIONS
            if _is_bool(node.returns) and not is_action and not node.name.startswith("__"):
                yield node.name, node.lineno
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if _is_bool(argument.annotation):
                    yield argument.arg, argument.lineno
        elif isinstance(node, ast.AnnAssign) and _is_bool(node.annotation):
            yield _target(node.target), node.lineno
        elif isinstance(node, ast.Assign) and ast.unparse(node.value) in {"True", "False"}:
            yield from ((_target(target), node.lineno) for target in node.targets)


def _is_bool(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in {"bool", "bool | None"}


def _target(target: ast.expr) -> str:
    if isinstance(target, ast.Attribute):
        return target.attr
    return target.id if isinstance(target, ast.Name) else "is_no_name"


def is_clear_boolean(name: str) -> bool:
    bare = name.strip("_").lower()
    return bare.split("_")[0] in BOOLEAN_PREFIXES or bare in CLEAR_BOOLEANS


def is_participle(name: str) -> bool:
    return bool(PARTICIPLE.fullmatch(name)) and name.strip("_") not in NOT_PARTICIPLES


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(d).split("(")[0].rsplit(".")[-1] for d in node.decorator_list}


def name_findings(path: Path, tree: ast.Module) -> Iterator[Finding]:
    for node in functions(tree):
        if is_participle(node.name) and not _decorators(node) & CONTEXT_DECORATORS:
            yield Finding("participle", path, node.lineno, node.name)
        yield from _callable_findings(path, node.args)
    for name, line in names_of_booleans(tree):
        if not is_clear_boolean(name):
            yield Finding("boolean", path, line, name)
    for name, line in _variables(tree):
        if name.strip("_") in VAGUE:
            yield Finding("vague", path, line, name)


def _callable_findings(path: Path, arguments: ast.arguments) -> Iterator[Finding]:
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        bare = argument.arg.strip("_")
        is_callable = argument.annotation and ast.unparse(argument.annotation).startswith(
            "Callable"
        )
        if is_callable and (is_participle(bare) or bare in VAGUE_CALLBACKS):
            yield Finding("callable", path, argument.lineno, argument.arg)


def _variables(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments, with those of consecutive lines as one."""
    line, column, parts = -1, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, start = token.start
        body = token.string.lstrip("#").strip()
        if row == line + len(parts) and start == column:
            parts.append(body)
            continue
        if parts:
            yield line, " ".join(parts)
        line, column, parts = row, start, [body]
    if parts:
        yield line, " ".join(parts)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def sentences(text: str) -> list[str]:
    return [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z`(*]|hopsgpu)|(?<=[:;])\s+", text) if s]


def begins_badly(sentence: str, *, is_first: bool) -> bool:
    bare = sentence.strip("`*(_ ")
    if FINE_STARTS.match(bare) or bare.endswith("?"):
        return False
    return bool(INVERSIONS.match(bare) or (is_first and PRONOUNS.match(bare)))


def prose_findings(path: Path, line: int, text: str) -> Iterator[Finding]:
    for number, sentence in enumerate(sentences(re.sub(r"\s+", " ", text).strip())):
        if begins_badly(sentence, is_first=number == 0):
            yield Finding("start", path, line, sentence[:90])
        if len(sentence.split()) > MOST_WORDS:
            yield Finding("long", path, line, sentence[:90])


def text_findings(path: Path, text: str, tree: ast.Module) -> Iterator[Finding]:
    for line, comment in comments(text):
        if not comment.startswith(("noqa", "type:", "!", "pragma")):
            yield from prose_findings(path, line, comment)
    for line, docstring in docstrings(tree):
        for paragraph in _paragraphs(docstring):
            yield from prose_findings(path, line, paragraph)


def _paragraphs(docstring: str) -> Iterator[str]:
    """Paragraphs, and each entry of "Args:" and the like as one; no code."""
    parts = [""]
    code = False
    for row in docstring.splitlines():
        if row.strip().startswith(("```", ">>>", "::")):
            code = not code if row.strip().startswith("```") else code
            parts.append("")
        elif not row.strip() or re.match(r"\s*(\*?\w+: |\w+:$|[-*|] )", row):
            parts.append(re.sub(r"^\s*(\*?\w+: |\w+:$|[-*] )", "", row))
        elif not code:
            parts[-1] += " " + row.strip()
    return (part for part in parts if part.strip() and not part.lstrip().startswith("|"))


def page_findings(path: Path, text: str) -> Iterator[Finding]:
    block = False
    line, paragraph = 0, ""
    for number, row in enumerate(text.splitlines() + [""], 1):
        if row.lstrip().startswith("```"):
            block = not block
        begins = re.match(r"\s*([-*] |\d+\. |#|\||<)", row)
        if block or not row.strip() or begins or row.lstrip().startswith("```"):
            if paragraph:
                yield from prose_findings(path, line, paragraph)
            line, paragraph = number, ""
            if not block and begins and not row.lstrip().startswith(("#", "|", "<", "```")):
                paragraph = re.sub(r"^\s*([-*] |\d+\. )", "", row)
        else:
            line = line if paragraph else number
            paragraph += " " + row.strip()


def symbol_findings(trees: Sequence[tuple[Path, ast.Module]], known: Set[str]) -> Iterator[Finding]:
    """Names in backticks of comments and docstrings that are nowhere in code."""
    for path, tree in trees:
        for line, text in (*comments(path.read_text()), *docstrings(tree)):
            for name in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)", text):
                if not known.issuperset(name.strip(".").split(".")):
                    yield Finding("symbol", path, line, name)


@functools.cache
def names_in_code() -> Set[str]:
    """Every identifier, keyword and word of a string that is no docstring, and every module."""
    known = {*NAMES_OF_OTHERS, *dir(builtins), *keyword.kwlist, *sys.stdlib_module_names}
    for path in files([ROOT / "hopsgpu", ROOT / "tests"], ".py"):
        known.update(path.with_suffix("").parts)
        documentation = {line for line, _ in docstrings(ast.parse(path.read_text()))}
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME:
                known.add(token.string)
            elif token.type == tokenize.STRING and token.start[0] not in documentation:
                known.update(re.findall(r"\w+", token.string))
    return known


def class_findings(trees: Sequence[tuple[Path, ast.Module]]) -> Iterator[Finding]:
    places: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path, tree in trees:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append((path, node.lineno))
    for name, found in places.items():
        if len(found) > 1:
            yield from (Finding("class", path, line, name) for path, line in found)


def files(places: Iterable[Path], suffix: str) -> list[Path]:
    return sorted(
        path
        for place in places
        for path in (place.rglob(f"*{suffix}") if place.is_dir() else [place])
        if path.suffix == suffix and "_build" not in path.parts and path.name != "conf.py"
    )


def findings(places: Sequence[Path]) -> list[Finding]:
    trees = [(path, ast.parse(path.read_text())) for path in files(places, ".py")]
    result = list(class_findings(trees))
    result += symbol_findings(trees, names_in_code())
    for path, tree in trees:
        result += name_findings(path, tree)
        result += text_findings(path, path.read_text(), tree)
    for path in files(places, ".md"):
        result += page_findings(path, path.read_text())
    return result


def counts(found: Iterable[Finding]) -> dict[str, int]:
    by_kind: dict[str, int] = defaultdict(int)
    for finding in found:
        by_kind[finding.kind] += 1
    return dict(sorted(by_kind.items()))


if __name__ == "__main__":
    everything = findings([Path(place) for place in sys.argv[1:]])
    for finding in sorted(everything):
        print(f"{finding.kind:10} {finding.path}:{finding.line}: {finding.text}")
    print(counts(everything))

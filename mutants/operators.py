"""Generate all single faults of a source file."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
}
TURNED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
PAIRS = (("min", "max"), ("amin", "amax"), ("mean", "sum"), ("any", "all"))
CALLS = {**dict(PAIRS), **{b: a for a, b in PAIRS}}
DROPPED_CALLS = ("detach", "clamp", "clamp_min", "exp", "abs", "flip", "square", "sqrt")
"""Methods whose call is replaced by the object it is called on."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: a replacement of bytes in a file."""

    path: str
    scope: str
    """Qualified name of the enclosing function or class."""
    line: int
    start: int
    """Offset of the first replaced byte."""
    end: int
    before: str
    after: str
    nth: int
    """Index among the equal faults of that scope."""

    @property
    def name(self) -> str:
        """A name that does not change when other code of the file does."""
        text = "\0".join((self.path, self.scope, self.before, self.after, str(self.nth)))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def rank(self, seed: int) -> str:
        """Return the sort key of the order in which mutants are drawn."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).hexdigest()

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants(path: str, source: bytes) -> list[Mutant]:
    """Return all faults that the operators generate for this file and that compile."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    seen: dict[tuple[str, str, str], int] = {}
    found = []
    for scope, node, after in finder.found:
        start, end = finder.span(node)
        before = source[start:end].decode()
        if after == before:
            continue
        nth = seen.get((scope, before, after), 0)
        seen[scope, before, after] = nth + 1
        mutant = Mutant(path, scope, node.lineno, start, end, before, after, nth)
        try:
            compile(mutant.applied(source), path, "exec")
        except SyntaxError:
            continue
        found.append(mutant)
    return found


class _Finder(ast.NodeVisitor):
    """Finds faults. Annotations, docstrings, error messages and registrations of names are not mutated."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.found: list[tuple[str, ast.expr | ast.stmt, str]] = []
        self.scopes: list[str] = []
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def add(self, node: ast.expr | ast.stmt, after: str) -> None:
        self.found.append((".".join(self.scopes), node, after))

    # ── where to look ────────────────────────────────────────────────────────────────────────────────────────────────

    def _scoped(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.scopes.append(node.name)
        if not isinstance(node, ast.ClassDef):
            for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _scoped

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip `raise`: faults in its condition are generated elsewhere."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions, which only narrow types here."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip formatted text."""

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call | ast.Await) and self.scopes:
            self.add(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "pass")
        other = ARITHMETIC.get(type(node.op))
        if other is not None:
            self.add(node, f"{self.text(node.target)} {other}= {self.text(node.value)}")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            other = COMPARISONS[type(node.ops[0])]
            self.add(node, f"{self.text(node.left)} {other} {self.text(node.comparators[0])}")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = ARITHMETIC.get(type(node.op))
        if other is not None and not isinstance(node.left, ast.Constant | ast.JoinedStr | ast.List):
            self.add(node, f"({self.text(node.left)}) {other} ({self.text(node.right)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        literal = isinstance(node.operand, ast.Constant)  # -1 and 1 are the same dimension of many tensors
        if isinstance(node.op, ast.USub | ast.Not | ast.Invert) and not literal:
            self.add(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self.add(node, word.join(f"({self.text(value)})" for value in node.values))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(node, str(not value))
        elif isinstance(value, int):
            self.add(node, f"({value} + 1)")
        elif isinstance(value, float):
            self.add(node, f"({value!r} * 2 + 1)")

    def visit_If(self, node: ast.If) -> None:
        turned = isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], TURNED)
        if not turned and not isinstance(node.test, ast.UnaryOp):  # `visit_UnaryOp` negates those
            self.add(node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add(node, f"({self.text(node.body)})")
        self.add(node, f"({self.text(node.orelse)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function, arguments = node.func, node.args
        if isinstance(function, ast.Attribute):
            if function.attr in CALLS:
                _, end = self.span(function)
                rest = self.source[end : self.span(node)[1]].decode()
                self.add(node, f"{self.text(function.value)}.{CALLS[function.attr]}{rest}")
            if function.attr in DROPPED_CALLS and not isinstance(function.value, ast.Name | ast.Attribute):
                self.add(node, f"({self.text(function.value)})")
            elif function.attr in DROPPED_CALLS and self.text(function.value) != "torch":
                self.add(node, self.text(function.value))
        elif isinstance(function, ast.Name) and function.id in CALLS:
            rest = self.source[self.span(function)[1] : self.span(node)[1]].decode()
            self.add(node, CALLS[function.id] + rest)
        if len(arguments) >= 2 and not any(isinstance(argument, ast.Starred) for argument in arguments[:2]):
            self._swap(node)
        for keyword in node.keywords:
            if keyword.arg is not None and len(node.keywords) > 1:
                self._without(node, keyword)
        self.generic_visit(node)

    def _swap(self, node: ast.Call) -> None:
        """Swap the first two arguments."""
        first, second = node.args[:2]
        (a, b), (c, d) = self.span(first), self.span(second)
        start, end = self.span(node)
        between = self.source[b:c].decode()
        head, tail = self.source[start:a].decode(), self.source[d:end].decode()
        self.add(node, f"{head}{self.text(second)}{between}{self.text(first)}{tail}")

    def _without(self, node: ast.Call, keyword: ast.keyword) -> None:
        """Remove a keyword argument, so that its default applies."""
        start, end = self.span(node)
        a, b = self.span(keyword.value)
        assert keyword.arg is not None
        a = self.source.rindex(keyword.arg.encode(), start, a)
        tail = self.source[b:end].lstrip()
        tail = tail[1:].lstrip() if tail.startswith(b",") else tail
        self.add(node, self.source[start:a].decode() + tail.decode())

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "continue")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and isinstance(node.value, ast.Name | ast.Call):
            self.add(node, "return None")
        self.generic_visit(node)

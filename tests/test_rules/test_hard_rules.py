"""The rules of the source tree that no linter knows, each a few lines over the syntax tree.

A rule is a function of a path inside the package and its syntax tree; it yields line numbers and what is wrong. Beside
each rule stand snippets that must break it and snippets that must not: a rule that cannot fail tests nothing.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[2] / "src" / "shardwise"
SOURCES = sorted(PACKAGE.rglob("*.py"))

PURE = (
    "layout.py",
    "sharding.py",
    "precision.py",
    "schedule.py",
    "config.py",
    "environment.py",
    "planner/",
    "errors.py",
)
NOT_CORE = ("cli/", "testing/", "models/", "data.py")

Breaches = Iterator[tuple[int, str]]


def is_in(path: str, places: Sequence[str]) -> bool:
    """Whether a path inside the package is one of the places; a place that ends in ``/`` is a folder."""
    return any(path.startswith(place) if place.endswith("/") else path == place for place in places)


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for a chain of names, else what of it can be named."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def references(tree: ast.AST) -> Breaches:
    """Yield every dotted name that is imported or mentioned, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute | ast.Name):
            yield node.lineno, dotted(node)


# Whoever starts processes also starts and ends the group; it moves no data.
GROUP_LIFE = frozenset(["init_process_group", "destroy_process_group", "is_initialized", "FileStore", "HashStore"])


def torch_distributed_in_one_file(path: str, tree: ast.AST) -> Breaches:
    if is_in(path, ("comm/process_group.py", "parallel/", "checkpoint/", "launch/", "compat/")):
        return
    starts_groups = is_in(path, ("cli/", "testing/"))
    for line, name in references(tree):
        if name == "torch.distributed" or name.startswith("torch.distributed."):
            member = name.removeprefix("torch.distributed").strip(".")
            if not starts_groups or member not in {"", *GROUP_LIFE}:
                yield line, f"{name}: only comm/process_group.py talks to other ranks"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                short = alias.asname or isinstance(node, ast.ImportFrom)
                if short and alias.name in ("distributed", "torch.distributed"):
                    yield node.lineno, "torch.distributed under a short name hides what it is used for"


STREAM_NAMES = frozenset(
    [
        "Stream",
        "ExternalStream",
        "StreamContext",
        "current_stream",
        "default_stream",
        "set_stream",
        "record_stream",
        "wait_event",
        "wait_stream",
    ]
)


def streams_in_one_file(path: str, tree: ast.AST) -> Breaches:
    if path != "lanes.py":
        for line, name in references(tree):
            last = name.rpartition(".")[2]
            if last in STREAM_NAMES or (last in ("Event", "stream") and name.startswith("torch.")):
                yield line, f"{name}: only lanes.py names streams and events"


FACTORIES = frozenset(
    f"torch.{name}" for name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "rand")
)


def lasting_memory_in_one_file(path: str, tree: ast.AST) -> Breaches:
    if path == "memory.py" or is_in(path, NOT_CORE):
        return
    for line, name in references(tree):
        if name.endswith(".resize_"):
            yield line, "resize_: only memory.py resizes a storage"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Call):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        kept = any(dotted(target).startswith("self.") for target in targets)
        if kept and dotted(node.value.func) in FACTORIES:
            yield (
                node.lineno,
                f"{dotted(node.value.func)} kept on self: memory that outlives a call comes from the Arena",
            )


def pure_layer_names_dtypes_only(path: str, tree: ast.AST) -> Breaches:
    if not is_in(path, PURE):
        return
    for line, name in references(tree):
        package, _, rest = name.partition(".")
        first = rest.partition(".")[0]
        if (
            package == "torch"
            and rest
            and first != "dtype"
            and not isinstance(getattr(torch, first, None), torch.dtype)
        ):
            yield line, f"{name}: the pure layer names torch.dtype and nothing else of torch"


DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CONTAINERS = frozenset(
    [
        "list",
        "dict",
        "set",
        "bytearray",
        "deque",
        "defaultdict",
        "Counter",
        "OrderedDict",
        "ChainMap",
        "fromkeys",
        "count",
        "local",
        "ContextVar",
        "WeakKeyDictionary",
        "WeakValueDictionary",
        "WeakSet",
    ]
)


def no_shared_mutable_state(path: str, tree: ast.AST) -> Breaches:
    for line, targets, value in _shared_assignments(tree):
        if targets == ["__all__"]:
            continue
        call = dotted(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        if isinstance(value, DISPLAYS) or call in CONTAINERS:
            yield line, f"{', '.join(targets)}: mutable, shared by everyone; use a tuple, frozenset or MappingProxyType"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def _shared_assignments(node: ast.AST) -> Iterator[tuple[int, list[str], ast.expr]]:
    """Yield the assignments of a module and of its class bodies, not those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Assign):
            yield child.lineno, [dotted(target) for target in child.targets], child.value
        elif isinstance(child, ast.AnnAssign) and child.value is not None:
            yield child.lineno, [dotted(child.target)], child.value
        else:
            yield from _shared_assignments(child)


def environment_read_in_one_place(path: str, tree: ast.AST) -> Breaches:
    if not is_in(path, ("environment.py", "testing/")):
        for line, name in references(tree):
            if name in ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"):
                yield line, f"{name}: the environment is read in environment.py"


def no_hasattr_as_state(path: str, tree: ast.AST) -> Breaches:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        on_self = dotted(node.args[0]).partition(".")[0] == "self"
        guess = dotted(node.func) == "hasattr" or (dotted(node.func) == "getattr" and len(node.args) == 3)
        if on_self and guess:
            yield node.lineno, "an object knows its own attributes: set them in __init__"


def network_below_runtime(path: str, tree: ast.AST) -> Breaches:
    if is_in(path, ("comm/",)):
        for line, name in references(tree):
            if name == "shardwise.runtime" or name.startswith("shardwise.runtime."):
                yield line, f"{name}: comm knows buffers, not units"


CODE_LOADERS = frozenset(["pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"])


def _restricted_unpicklers(tree: ast.AST) -> set[int]:
    """Return the lines of classes that are unpicklers with a list of what they know, and of the import for them."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(dotted(base).endswith("Unpickler") for base in node.bases):
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if {"find_class", "persistent_load"} <= methods:
                lines.add(node.lineno)
    if lines:
        lines |= {
            node.lineno for node in ast.walk(tree) if isinstance(node, ast.Import) and node.names[0].name == "pickle"
        }
    return lines


def nothing_read_is_run(path: str, tree: ast.AST) -> Breaches:
    restricted = _restricted_unpicklers(tree) if is_in(path, ("checkpoint/doors/",)) else set()
    for line, name in references(tree):
        if name.partition(".")[0] in CODE_LOADERS and line not in restricted:
            yield line, f"{name}: reading it can run code"
        if name in ("eval", "exec", "builtins.eval", "builtins.exec", "torch.hub.load", "runpy.run_path"):
            yield line, f"{name}: runs what it is given"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        if dotted(node.func) == "torch.load" and not _is_true(options.get("weights_only")):
            yield node.lineno, "torch.load without weights_only=True"
        if _is_true(options.get("allow_pickle")):
            yield node.lineno, "allow_pickle=True"


def no_object_collectives(path: str, tree: ast.AST) -> Breaches:
    names = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
    for line, name in references(tree):
        if name.rpartition(".")[2] in (*names, "send_object_list", "recv_object_list"):
            yield line, f"{name}: unpickles what a peer sends"


def no_shell(path: str, tree: ast.AST) -> Breaches:
    for line, name in references(tree):
        if name in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"):
            yield line, f"{name}: goes through a shell"
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "shell" and not _is_false(node.value):
            yield node.value.lineno, "shell=True: pass a list of arguments"


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def nobody_asks_which_stage(path: str, tree: ast.AST) -> Breaches:
    settings = (
        "config/",
        "start.py",
        "engine.py",
        "train/",
        "simulation/",
        "sizing/",
        "audit/",
    )  # what a user writes names a stage
    if is_in(path, ("__init__.py", "sharding.py", "api.py", *settings, "cli/", "testing/")):
        return
    for node in ast.walk(tree):
        for name in _identifiers(node):
            if {"stage", "stages"} & set(name.lower().split("_")):
                line = getattr(node, "lineno", 0)
                yield line, f"{name}: the core knows axis sets, not stages"


def _identifiers(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "arg", "name", "asname"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A checker, with (path, code) pairs that must break it and pairs that must not."""

    check: Callable[[str, ast.AST], Breaches]
    bad: tuple[tuple[str, str], ...]
    good: tuple[tuple[str, str], ...]


RULES = (
    Rule(
        check=torch_distributed_in_one_file,
        bad=(
            ("api.py", "import torch.distributed as dist"),
            ("api.py", "from torch.distributed import init_process_group"),
            ("testing/ranks.py", "from torch.distributed import all_reduce"),
            ("hooks.py", "from torch import distributed"),
            ("cli/demo.py", "import torch\ntorch.distributed.barrier()"),
            ("cli/demo.py", "import torch.distributed as dist\ndist.barrier()"),
        ),
        good=(
            ("comm/process_group.py", "import torch.distributed as dist"),
            ("cli/demo.py", "import torch\ntorch.distributed.init_process_group('gloo')"),
            ("api.py", "import torch\ntorch.distributions.Normal(0, 1)"),
        ),
    ),
    Rule(
        check=streams_in_one_file,
        bad=(
            ("runtime/bucket.py", "torch.cuda.current_stream()"),
            ("memory.py", "tensor.record_stream(stream)"),
            ("comm/process_group.py", "from torch.cuda import Stream"),
            ("comm/base.py", "torch.cuda.Event()"),
            ("hooks.py", "with torch.cuda.stream(side): pass"),
        ),
        good=(
            ("lanes.py", "torch.cuda.Event(); torch.cuda.current_stream()"),
            ("comm/threads.py", "threading.Event()"),
            ("schedule.py", "Event = Begin | End"),
        ),
    ),
    Rule(
        check=lasting_memory_in_one_file,
        bad=(
            ("runtime/bucket.py", "self.full.untyped_storage().resize_(0)"),
            ("runtime/bucket.py", "class A:\n def f(self):\n  self.full = torch.empty(4)"),
            ("optim/shard.py", "class A:\n def f(self):\n  self.m: Tensor = torch.zeros(4)"),
        ),
        good=(
            ("memory.py", "self.full.untyped_storage().resize_(0)"),
            ("runtime/bucket.py", "def f():\n scratch = torch.empty(4)\n return scratch"),
            ("models/gpt.py", "class A:\n def f(self):\n  self.mask = torch.ones(4)"),
        ),
    ),
    Rule(
        check=pure_layer_names_dtypes_only,
        bad=(
            ("layout.py", "import torch\ntorch.empty(3)"),
            ("planner/memory.py", "from torch import Tensor"),
            ("precision.py", "from torch import nn"),
            ("schedule.py", "import torch.nn"),
        ),
        good=(
            ("layout.py", "import torch\nx: torch.dtype = torch.bfloat16\ny = torch.float32.itemsize"),
            ("hooks.py", "from torch import Tensor"),
        ),
    ),
    Rule(
        check=no_shared_mutable_state,
        bad=(
            ("api.py", "cache = {}"),
            ("api.py", "cache: dict[int, int] = dict()"),
            ("hooks.py", "import weakref\nunits = weakref.WeakKeyDictionary()"),
            ("hooks.py", "if True:\n  seen = [x for x in y]"),
            ("hooks.py", "class A:\n  seen = set()"),
            ("api.py", "def f():\n  global count\n  count = 1"),
            ("lanes.py", "queue = collections.deque()"),
        ),
        good=(
            ("api.py", "__all__ = ['shard']\nNAMES = ('a', 'b')\nSIZES = frozenset([1])"),
            ("api.py", "TABLE = MappingProxyType({'a': 1})\nAlias = dict[str, int]"),
            ("api.py", "def f():\n  cache = {}\n  return cache"),
            ("api.py", "class A:\n  def __init__(self):\n    self.seen = set()"),
        ),
    ),
    Rule(
        check=environment_read_in_one_place,
        bad=(
            ("api.py", "import os\nos.environ['RANK']"),
            ("comm/process_group.py", "from os import getenv"),
            ("cli/demo.py", "import os\nos.environ.setdefault('X', '1')"),
        ),
        good=(
            ("environment.py", "import os\nos.environ['RANK']"),
            ("testing/faults.py", "import os\nos.environ.get('X')"),
            ("api.py", "import os\nos.getpid()"),
        ),
    ),
    Rule(
        check=no_hasattr_as_state,
        bad=(
            ("api.py", "hasattr(self, 'ready')"),
            ("api.py", "hasattr(self.bucket, 'full')"),
            ("api.py", "getattr(self, 'ready', False)"),
        ),
        good=(
            ("api.py", "hasattr(torch, 'new_name')"),
            ("sharding.py", "getattr(self, field)"),
        ),
    ),
    Rule(
        check=network_below_runtime,
        bad=(
            ("comm/base.py", "from shardwise.runtime.bucket import Bucket"),
            ("comm/fake.py", "import shardwise.runtime"),
        ),
        good=(("api.py", "from shardwise.runtime.bucket import Bucket"),),
    ),
    Rule(
        check=nothing_read_is_run,
        bad=(
            ("api.py", "import pickle"),
            ("api.py", "from pickle import load"),
            ("api.py", "eval('1')"),
            ("api.py", "exec(text)"),
            ("api.py", "torch.load(path)"),
            ("api.py", "torch.load(path, weights_only=False)"),
            ("api.py", "numpy.load(path, allow_pickle=True)"),
        ),
        good=(
            ("api.py", "model.eval()"),
            ("api.py", "torch.load(path, weights_only=True)"),
            ("api.py", "json.loads(text)"),
        ),
    ),
    Rule(
        check=no_object_collectives,
        bad=(("comm/process_group.py", "dist.all_gather_object(out, x)"),),
        good=(("comm/process_group.py", "dist.all_gather_into_tensor(out, x)"),),
    ),
    Rule(
        check=no_shell,
        bad=(
            ("cli/main.py", "os.system('ls')"),
            ("cli/main.py", "subprocess.run(line, shell=True)"),
        ),
        good=(
            ("cli/main.py", "subprocess.run([python, '-m', name])"),
            ("cli/main.py", "subprocess.run(line, shell=False)"),
        ),
    ),
    Rule(
        check=nobody_asks_which_stage,
        bad=(
            ("runtime/bucket.py", "if self.stage == 3: pass"),
            ("hooks.py", "def f(zero_stage): pass"),
            ("comm/base.py", "from shardwise.sharding import stage_sharding"),
            ("optim/shard.py", "STAGES = (1, 2)"),
        ),
        good=(
            ("api.py", "def shard(model, *, stage=3): pass"),
            ("runtime/bucket.py", "staging = arena.slab(Kind.STAGING)"),
        ),
    ),
)


def broken_by(rule: Rule, path: str, code: str) -> list[str]:
    return [f"{path}:{line}: {what}" for line, what in rule.check(path, ast.parse(code, path))]


def name_of(rule: Rule) -> str:
    return rule.check.__name__


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_source_tree_keeps_the_rule(rule: Rule) -> None:
    breaches = []
    for source in SOURCES:
        breaches += broken_by(rule, source.relative_to(PACKAGE).as_posix(), source.read_text())
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_rule_fails_on_code_that_breaks_it(rule: Rule) -> None:
    for path, code in rule.bad:
        assert broken_by(rule, path, code), f"{path}: {code!r} passes"


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_rule_passes_on_code_that_keeps_it(rule: Rule) -> None:
    for path, code in rule.good:
        assert broken_by(rule, path, code) == []


def test_source_tree_is_found() -> None:
    assert PACKAGE / "layout.py" in SOURCES

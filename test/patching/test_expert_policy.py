"""The module that the queue adds to SGLang: our package's stage where it is installed, else nothing at all."""

import inspect
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from sglang_xshare import hooks
from sglang_xshare.patching.patch import parse_patch
from sglang_xshare.patching.queue import find_root, list_releases, load_queue

PATCH = "shared/expert-policy.patch"


@pytest.fixture
def load(monkeypatch):
    """Call it for the added module, run where the named modules are not installed, or where our hooks are `older`."""
    (file,) = parse_patch((find_root() / PATCH).read_text(), PATCH).files
    source = b"".join(file.hunks[0].target).decode()

    def run(*missing: str, older: bool = False) -> ModuleType:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang_xshare" or name in missing]:
            monkeypatch.delitem(sys.modules, name)
        for name in missing:
            monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
        if older:
            monkeypatch.setitem(sys.modules, "sglang_xshare.hooks", ModuleType("sglang_xshare.hooks"))
        module = ModuleType("expert_policy")
        exec(compile(source, file.path, "exec"), module.__dict__)
        return module

    return run


def functions(module: ModuleType) -> dict[str, list[str]]:
    """Its public functions, and the names of their parameters."""
    found = inspect.getmembers(module, inspect.isfunction)
    return {name: [*inspect.signature(function).parameters] for name, function in found if not name.startswith("_")}


def test_with_the_package_it_is_the_stage(load):
    assert functions(load()) == functions(hooks)
    assert load().route.__module__ == "sglang_xshare.hooks"


@pytest.mark.parametrize("missing", ["sglang_xshare", "sglang_xshare.hooks"])
def test_without_the_package_every_call_returns_what_it_was_given(load, missing):
    module = load(missing)
    assert functions(module) == functions(hooks)
    one, two = object(), object()
    assert module.route(one, one) is one
    assert module.prepare(one, two, one) == (two, one)
    assert module.finish(one, two, one, None) is module.finish(one, two, one, one) is two
    assert module.extend(one, None, {}) is one
    assert module.align(lambda *args: args, one, 16, 8) == (one, 16, 8)
    assert (module.capture_sizes(one, [1, 2, 4]), module.report(one)) == ([1, 2, 4], "")
    off = SimpleNamespace(expert_policy=None, mask_padding_experts=False)
    calls = [(module.check_flags, off), (module.check_server, off), (module.attach, one), (module.publish, one)]
    for function, argument in [*calls, (module.check_exit, 1), (module.dispatcher, one)]:
        assert function(argument) is None
    assert module.watch_requests(one, two) is None
    assert module.check_flags(SimpleNamespace(load_balance_method="round_robin")) is None


SWITCHES = ("mask_padding_experts", "expert_policy_ignore_client_exact")
GIVEN: list[tuple[str, object]] = [
    *((name, name in SWITCHES or "given") for name in hooks.FLAGS),
    *(("expert_policy", "vanilla"), ("expert_policy_config", {}), ("load_balance_method", "expert_affinity")),
]


@pytest.mark.parametrize(("field", "value"), GIVEN)
def test_without_the_package_every_flag_is_refused_in_one_line(load, field, value):
    module = load("sglang_xshare")
    flag = f"--{field.replace('_', '-')}" + ("" if value is True else f" {value}")
    with pytest.raises(ValueError, match=f"^{flag}: needs the package sglang-xshare.*$") as refusal:  # by Engine(...)
        module.check_flags(SimpleNamespace(**{field: value}))
    assert isinstance(refusal.value, SystemExit)


def test_a_package_of_another_version_is_as_none(load):
    """Between the two commands of an upgrade: the hooks lack a name that the patches ask for."""
    module = load(older=True)
    assert module.route(1, 2) == 1
    with pytest.raises(ValueError, match="not in the version of these patches"):
        module.check_flags(SimpleNamespace(expert_policy="xshare"))


def test_a_package_that_is_not_whole_is_no_missing_one(load):
    with pytest.raises(ModuleNotFoundError, match="orjson"):
        load("orjson").check_flags(SimpleNamespace(expert_policy="xshare"))


def test_every_flag_of_the_patches_is_known(load):
    """The arguments patches of each release add these fields."""
    queues = [load_queue(find_root(), release) for release in list_releases(find_root())]
    known = set(load("sglang_xshare").FIELDS)
    assert set(hooks.FLAGS) == known
    for queue in queues:
        files = [file for patch in queue.patches if "arguments" in patch.name for file in patch.files]
        added = [line.decode() for file in files for hunk in file.hunks for line in set(hunk.target) - set(hunk.source)]
        fields = {line.split(":")[0].strip() for line in added if ": A[" in line}
        assert fields == known, queue.release


def test_alone_it_refuses_in_one_line_and_exits_with_1(tmp_path):
    """Without the package: nothing of ours, no SGLang, in a process of its own."""
    (file,) = parse_patch((find_root() / PATCH).read_text(), PATCH).files
    (tmp_path / "expert_policy.py").write_bytes(b"".join(file.hunks[0].target))
    code = "import expert_policy, types; expert_policy.check_flags(types.SimpleNamespace(expert_policy='oea'))"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append('.'); {code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("--expert-policy oea: needs the package sglang-xshare")
    assert done.stderr.count("\n") == 1

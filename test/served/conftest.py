"""Servers that several tests ask the same."""

import os
import pickle
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

from served import host
from served.answers import SERVERS, SIZES, ask, make_server, read_prompts
from served.ranks import serve
from served.release import LATEST


@pytest.fixture(scope="session")
def served(tiny_model, patched_release, pristine_release, tmp_path_factory, request):
    """Call it with a name of SERVERS, or "unpatched", for its answers. Each server runs once and alone, whichever of
    pytest's workers requests it first. The parts of `make test-long` share the answers in the folder $SERVED.
    """
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent  # of this run's workers
    folder = Path(os.environ.get("SERVED", folder))

    @cache
    def run(name, release):
        kept = folder / f"served-{name}-{release}.pickle"
        with FileLock(f"{kept}.lock"):
            if kept.exists():
                return pickle.loads(kept.read_bytes())
            tree = pristine_release(release) if name == "unpatched" else patched_release(release)
            flags = () if name == "unpatched" else SERVERS[name]
            answers = ask(tiny_model, tree, flags, tmp_path_factory.mktemp("served"), SIZES.get(name, (16, 16, 1)))
            written = kept.with_suffix(".part")  # a worker that is stopped leaves no half of it
            written.write_bytes(pickle.dumps(answers))
            written.replace(kept)
            return answers

    return lambda name, release=LATEST: run(name, release)


@pytest.fixture(scope="session")
def prompts(tiny_model):
    """Those of `read_prompts`."""
    return read_prompts(tiny_model)


@pytest.fixture
def small_server(tiny_model, patched_release, tmp_path):
    """Call it with flags for a server of the small checkpoint, not started yet, with its probe's and its trace's files.
    Plugins that the test has put in `scratch` are the server's.
    """

    def make(*flags, release=LATEST, env=None, scratch=tmp_path):
        return make_server(tiny_model, patched_release(release), flags, scratch, env)

    return make


@pytest.fixture(scope="session")
def asked(tiny_model, patched_release, tmp_path_factory):
    """Call it with flags for the answers of a server, as `answers.ask` returns them. Tests of one file share a server
    if all arguments are equal; `hosted` installs the plugin of `host.py`.
    """

    @cache
    def run(flags, release, sizes, staggered, env, hosted):
        scratch = tmp_path_factory.mktemp("asked")
        if hosted:
            host.install(scratch)
        return ask(tiny_model, patched_release(release), flags, scratch, sizes, dict(env), staggered)

    def request(*flags, release=LATEST, sizes=(16, 16, 1), staggered=False, env=None, hosted=False):
        sizes = sizes[:1] if staggered else sizes
        return run(flags, release, sizes, staggered, tuple((env or {}).items()), hosted)

    return request


@pytest.fixture(scope="session")
def ranked(tiny_model, patched_release, pristine_release, tmp_path_factory):
    """Call it with flags for what a server of several ranks does, of a release's patched tree unless told otherwise."""

    @cache
    def run(flags, release, patched):
        tree = (patched_release if patched else pristine_release)(release)
        return serve(tiny_model, tree, flags, tmp_path_factory.mktemp("ranked"))

    return lambda *flags, release=LATEST, patched=True: run(flags, release, patched)

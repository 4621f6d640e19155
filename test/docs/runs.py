"""How the test runs each command that a document shows: at the smallest size that still goes through."""

from dataclasses import replace

from docs.kinds import Ask, Elsewhere, Parse, Run, Same, Serve
from served.hub import ON_HUB

TINY = "checkpoints/qwen3-moe-tiny"
QWEN = {"Qwen/Qwen3-30B-A3B": TINY}
CPU = "--config examples/cpu.yaml --enable-metrics"

START = f"sglang serve --model-path {TINY} --config examples"
QUICKSTART = f"{START}/cpu.yaml --expert-policy xshare --enable-metrics"
EXAMPLE = f"{START}/cpu.yaml --expert-policy oea --expert-policy-config '{{\"k0\": 3}}' --enable-metrics"
TUNED = f"{START}/cpu.yaml --expert-policy observe --enable-custom-logit-processor"
HERE = "http://localhost:30000"
RANDOM = "python -m sglang.benchmark.serving --backend sglang --dataset-name random-ids"
JSON = "-H 'content-type: application/json'"
COMPLETE = f"curl -s localhost:30000/v1/completions {JSON} -d"
FEW = "--port {port} --num-prompts 8 --random-input-len 8 --random-output-len 8 --output-file {scratch}/bench.jsonl"
SHORT = "--rounds 1 --output-tokens 8"
ROUND = f"--requests 4 --concurrency 4 {SHORT}"
SMALL = f"{ROUND} --sums 4 --per-domain 4 --loss-tokens 8"


def measure(more: str, is_long: bool = True) -> Run:
    """A benchmark at this size, with its record in the scratch folder."""
    return Run(more=f"{more} --out {{scratch}}", shows="[Rr]ecord: ", is_long=is_long)


QUALITY = measure("--per-domain 4 --batch 4 --prompt 16 --steps 8")
DEMO = measure(SMALL)
SERVED = measure(f"--model {TINY} {SMALL}")
PREFERRED = "xshare:k0=1,add=4,utility=squared,own_share=0.75"
OWN = {"--model DIR": f"--model {TINY}", "--texts DIR": f"--texts {TINY}/heldout"}
OWN_SERVED, OWN_QUALITY = replace(DEMO, replace=OWN), replace(QUALITY, replace=OWN)
MINE = {"mine:budget": "custom:budget"}
SCRATCH = {"DIR": "{scratch}"}
COST = measure(f"--model {TINY} --rounds 2 --step-rounds 1 --step-tokens 4")
BALANCE = measure("--batches 2", is_long=False)
SHARDING = measure("--alpha 0.6 --experts 8 --batch 4 --sequence 6 --hidden 16 --width 32 --rounds 1")
AFFINITY = measure("--replicas 2 --per-replica 4 --requests 24 --life 12 --per-domain 8 --calibration 384")
DRAFTS = "drafts-1x8 drafts-4x16"
TRAINED = Run(more="--steps 1 --out {scratch}/model --state {scratch}/state.pt", shows="step 1: exported", is_long=True)
NO_GPU = Run(status=2, shows="gpu: no NVIDIA GPU answers here; nothing was measured")
INSTALLED = Elsewhere("test/scripts/test_installed.py", "it changes an environment, which must be one of its own")
WHOLE = "a test cannot hold the whole"
BUILT = Elsewhere("test/training/test_models.py", "that builds the model")

EVALUATED = "it installs the harness first; other tasks than ours need the network"

TUNING = Elsewhere("test/benchmark/tuning/test_tuning.py", "that does so, to one tolerance")
LESS = "that asks for less"
BENCHMARKS: dict[str, Run | Elsewhere] = {
    "serving --skip 32": replace(SERVED, more=f"off oea:k0=3 {SERVED.more}"),
    "serving off xshare:k0=1,add=24 oea:k0=3": SERVED,
    "serving off --drafted off xshare moe-spec:budget=32 --topk 4 --draft-tokens 8": SERVED,
    "serving vanilla xshare --model DIR --texts DIR --concurrency 8 --input-tokens 64 --output-tokens 64": OWN_SERVED,
    "serving.exact": measure("xshare:k0=1,add=8 --exact 0 2 --rounds 1 --output-tokens 8 --loss-batches 1"),
    "tuning": TUNING,
    "tuning --offline": TUNING,
    "affinity": measure("mixed --per-domain 8 --requests 100 --seeds 1 --calibration 384 --replicas 2"),
    "affinity.live": replace(AFFINITY, more=f"expert_affinity {AFFINITY.more}"),
    "affinity.live --traffic mixed shift flood --policies vanilla xshare:k0=1,add=16": AFFINITY,
    "expert_sharding": SHARDING,
    "expert_sharding --ranks 4 --alpha 0.6 --experts --batch": SHARDING,
    "expert_sharding.served": measure(f"--model {TINY} {ROUND}"),
    "depth": measure(f"off --model {TINY} --concurrency 1 --fixed 0 1 --waves 2 --settled 1 {SHORT}"),
    "depth.changes": measure(f"--model {TINY} --from-requests 2 --changes 1 --output-tokens 8"),
    "paged": measure(f"{PREFERRED} --per-domain 4 --prompt 16 --steps 8 --batch 4 --slots 16"),
    "paged.live": measure(f"{PREFERRED} --model {TINY} {SMALL}"),
    "balance": BALANCE,
    "balance vanilla xshare:k0=1,target_per_rank=5 --batch 32": replace(BALANCE, is_long=True),
    "balance.live": Elsewhere("test/benchmark/balance/test_live.py", LESS),
    "cost": COST,
    "cost xshare:k0=1,add=24 --shapes 16x128 64x256": COST,
    "cost.ranks": measure("--experts 8 --active 4 8 --batch 8 --rounds 1 --hidden 16 --width 32", is_long=False),
    "neighbours": measure("--prompts 2 --others 3 --prompt 8 --tokens 4"),
    "quality": QUALITY,
    "quality xshare:k0=1,add=24 oea:k0=3": QUALITY,
    "quality vanilla xshare:k0=1,add=24 oea:k0=3": QUALITY,
    "quality --batch 4 --tokens-per-request 4 xshare moe-spec:budget=32": QUALITY,
    **{
        f"quality.{name}": Elsewhere(f"test/benchmark/quality/test_{name.split()[0]}.py", LESS)
        for name in ("defaults", "defaults --batch 1 2 4 8 16 --tokens-per-request 4", "drafts", "front", "samples")
    },
}

RUNS: dict[str, Run | Serve | Ask | Parse | Same | Elsewhere] = {
    **{start: Parse() for family in ON_HUB.values() for start in family.list_starts()},
    "PYTHONPATH=python:test python -m docs.families": Run(more="--check", is_long=True),
    # install, upgrade, leave
    "pip install ./python": Run(more="--no-deps --target {scratch}", is_long=True),
    "pip install --upgrade ./python": Run(more="--no-deps --target {scratch}", is_long=True),
    "sglang-xshare patch apply": Run(more="--target {tree}", shows="applied"),
    "PYTHONPATH=python python -m sglang_xshare patch status": Run(more="--target {tree}", shows="not patched"),
    "pip install sglang==0.5.23": INSTALLED,
    "pip uninstall --yes sglang-xshare": INSTALLED,
    "pip install --force-reinstall --no-deps sglang==0.5.23": Run(more="--dry-run", is_long=True),
    "make sglang-wheel SGLANG=0.5.23": INSTALLED,
    "pip install dist/*.whl": INSTALLED,
    "sglang-xshare patch revert": Run(more="--target {tree}"),
    "sglang-xshare patch status": Run(more="--target {tree}", shows="not patched"),
    "sglang-xshare policies": Run(shows="target_per_rank"),
    "sglang-xshare policies custom": Run(shows="ranking"),
    "sglang-xshare check --model DIR --gpu h100 --batch 16 --expert-policy xshare --compare oea:k0=3": Run(
        {"DIR": TINY}, shows="served"
    ),
    "sglang-xshare check --model DIR --gpu rtx4090 --enable-paged-experts --paged-experts-num-resident 32"
    f" --expert-policy {PREFERRED}": Run({"DIR": TINY}, shows="left for the KV cache", is_long=True),
    "python examples/affinity_router.py --router http://localhost:30001 --table FILE --model DIR": Elsewhere(
        "test/affinity/test_router.py", "SGLang's router is a package of its own"
    ),
    "sglang serve --model-path DIR --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT"
    " --speculative-adaptive --expert-policy-draft-depth throughput": Elsewhere(
        "test/served/test_draft_depth.py", "its draft takes flags of its own on a CPU"
    ),
    "sglang-xshare calibrate --model DIR --texts DIR --out FILE": Run(
        {**OWN, "FILE": "{scratch}/table"}, "--tokens 256", "1024 ids x 32 dimensions", is_long=True
    ),
    "sglang serve --model-path DIR --dp-size 4 --load-balance-method expert_affinity --expert-affinity FILE": Elsewhere(
        "test/served/test_affinity.py", "replicas on a CPU are told their cores, and the file has to be made first"
    ),
    "sglang serve --model-path DIR --tp 4 --expert-placement shard": Elsewhere(
        "test/served/test_parallel.py", "ranks on a CPU are told their cores, and four want four"
    ),
    "sglang-xshare policies --show xshare:k0=1,add=24": Run(shows='"add": 24'),
    # serve and ask
    "sglang serve --model-path Qwen/Qwen3-30B-A3B --expert-policy xshare --enable-metrics": Serve(QWEN, CPU),
    "sglang serve --model-path Qwen/Qwen3-30B-A3B --enable-paged-experts --paged-experts-num-resident 32"
    f" --expert-policy {PREFERRED} --enable-metrics": Serve(QWEN, CPU),
    QUICKSTART: Serve(is_long=False),
    f"curl -s localhost:30000/v1/chat/completions {JSON}"
    """ -d '{"messages": [{"role": "user", "content": "55+74"}], "temperature": 0, "stop": "\\n"}'""": Ask(
        QUICKSTART, shows='" 129"'
    ),
    f"{RANDOM} --random-input-len 64 --random-output-len 32 --random-range-ratio 1 --num-prompts 32"
    " --max-concurrency 16": Ask(QUICKSTART, FEW, r"Successful requests: +8"),
    f"{RANDOM} --random-input-len 128 --random-output-len 256 --random-range-ratio 1 --num-prompts 64"
    " --max-concurrency 16": Ask(EXAMPLE, FEW, r"Successful requests: +8"),
    TUNED: Serve(),
    f"sglang-xshare tune {HERE} --texts {TINY}/heldout --tolerance 1% --out build/tuned": Ask(
        TUNED, "--out {scratch} --samples 8 --batches 4 --prompt 8 --tokens 8 --groups 1", "report: "
    ),
    f"python -m benchmark.quality --url {HERE} xshare:k0=1,add=8 oea:k0=3": Ask(
        TUNED, "--per-domain 4 --batch 4 --prompt 8 --steps 8 --out {scratch}", "oea:k0=3"
    ),
    f"python -m benchmark.quality --url {HERE} --prompts prompts.jsonl oea:k0=3": Elsewhere(
        "test/benchmark/quality/test_served.py", "that has such a file"
    ),
    f"sglang-xshare policy get {HERE}": Ask(QUICKSTART, shows="xshare"),
    f"sglang-xshare top {HERE}": Ask(QUICKSTART, shows="Active experts of a step by layer"),
    f"sglang-xshare policy set {HERE} xshare:k0=1,add=6": Ask(QUICKSTART, shows="switches: 1"),
    f"""curl -s localhost:30000/expert_policy {JSON} -d '{{"policy": "xshare", "k0": 1, "add": 6}}'""": Ask(
        QUICKSTART, shows='"switches":2'
    ),
    f"sglang-xshare policy set {HERE} xshare:k0=1,add=6 --exact-by-default": Ask(
        QUICKSTART, shows='exact.*"default": true'
    ),
    """curl -s localhost:30000/metrics | grep 'expert_policy_steps_total.*outcome="policy"'""": Ask(
        QUICKSTART, shows='outcome="policy".*} [1-9]'
    ),
    f"{START}/eagle3.yaml --expert-policy xshare --enable-metrics": Serve(),
    EXAMPLE: Serve(),
    f"{START}/cpu.yaml --enable-metrics --expert-policy"
    """ 'observe:{"plans": ["xshare:k0=1,add=24", "oea:k0=3"]}'""": Serve(),
    f"""{COMPLETE} '{{"prompt": ["def ", "import "], "max_tokens": 24}}'""": Ask(EXAMPLE, shows='"text"'),
    f"""{COMPLETE} '{{"prompt": "def ", "max_tokens": 24, "custom_params": {{"expert_policy": "exact"}}}}'""": Ask(
        QUICKSTART, shows='"exact":true'
    ),
    f"sglang-xshare policy set {HERE} vanilla": Ask(QUICKSTART, shows="switches: 4"),
    f"{START}/cpu.yaml --expert-policy xshare --expert-policy-config examples/by-layer-and-batch.json": Serve(),
    f"SGLANG_USE_CPU_ENGINE=1 {START}/cpu.yaml": Serve(),
    f"TORCHDYNAMO_DISABLE=1 SGLANG_USE_CPU_ENGINE=1 {START}/eagle3.yaml"
    " --speculative-eagle-topk 4 --speculative-num-draft-tokens 8": Serve(),
    "python examples/engine.py build/trace.jsonl": Run({"build/": "{scratch}/"}, shows="Q: 55", is_long=True),
    "python examples/plot_trace.py build/trace.jsonl build/trace.png": Run(
        {"build/trace.jsonl": "{trace}", "build/": "{scratch}/"}
    ),
    # the environment, tests, the lint
    "make help": Run(shows="test-long"),
    "make venv": Elsewhere("test/scripts/test_make_venv.py", "it makes the environment that runs the tests"),
    "make patch": Run(more="--target {tree}", shows="applied"),
    "python -m scripts.reference": Run(more="--check"),
    "make lint": Run(shows="patches looked at", is_long=True),
    "make test": Run(more="-q --collect-only", shows="tests collected", is_long=True),  # this test is one of them
    "make test-long": Elsewhere("test/scripts/test_test_long.py", WHOLE),
    "make test-cuda": Elsewhere("test/fake_gpu/test_servers.py", "it takes an environment of 10 GB"),
    "make test-long PART=patching/test_kill": Elsewhere("test/scripts/test_test_long.py", WHOLE),
    ".venv/bin/python -m pytest test/policies": Run(more="-q --collect-only", shows="tests collected"),
    ".venv/bin/python -m pytest sgl-kernel/tests": Run(more="-q --collect-only", shows="tests collected"),
    ".venv/bin/python sgl-kernel/benchmark/attention.py": Run(shows="prefill", is_long=True),
    "pip install -r scripts/requirements-cpu.txt": Run(more="--dry-run", is_long=True),
    "pip install --no-deps sglang==0.5.23 -e sgl-kernel": Run(more="--dry-run", is_long=True),
    # the patch queue
    "make release-check SGLANG=0.5.24": Run({"0.5.24": "0.5.23"}, shows="0.5.23 is supported"),
    "make release-check SGLANG=0.5.16": Run({"0.5.16": "0.5.21"}, shows="0.5.21 is supported"),
    ".venv/bin/python -m scripts.patch_lint": Run(),
    ".venv/bin/python -m scripts.compatibility": Run(more="--check", is_long=True),
    ".venv/bin/python -m scripts.runners": Run(more="--check", is_long=True),
    "python -m scripts.fetch_release 0.5.17 0.5.21 0.5.23": Run(),
    ".venv/bin/python -m scripts.upstream_tests ../sglang": Run(
        {"../sglang": "{scratch}"}, shows="the commit must be v", status=1
    ),
    ".venv/bin/python -m scripts.pin_release 0.5.24": Run({"0.5.24": "0.5.23"}),
    "python -m scripts.pin_release 0.5.23": Run(),
    "cp -r patches/0.5.23 patches/0.5.24": Run({"patches/0.5.24": "{scratch}/0.5.24"}),
    # measure
    "python -m benchmark.records": Same("make records"),
    "python -m benchmark.records --check": Run(),
    f"python -m benchmark.records {DRAFTS}": Run({DRAFTS: "--check"}),  # small: test/benchmark
    "make records": Run(more="--small --dirty --out {scratch} quality cost balance", shows=r"3/3\] bal", is_long=True),
    **{f"python -m benchmark.{text}": run for text, run in BENCHMARKS.items()},
    **dict.fromkeys(
        (
            *("make eval TASKS=arithmetic_domain", "make eval TASKS=gsm8k"),
            "make eval PYTHON=python TASKS=gsm8k URL=http://localhost:30000",
            'make eval TASKS="gsm8k ifeval" URL=http://localhost:30000 EVAL_ARGS="--chat --policies off'
            ' xshare:k0=1,add=24 xshare:k0=1,add=12,utility=squared,own_share=0.75"',
        ),
        Elsewhere("test/benchmark/evaluation/test_served.py", EVALUATED),
    ),
    "make demo": DEMO,
    "python -m benchmark.demo": Same("make demo"),
    'make bench POLICIES="vanilla xshare:k0=1,add=24 oea:k0=3" BENCH_ARGS="--model DIR --texts DIR"': OWN_SERVED,
    'make bench POLICIES="vanilla mine:budget=32"': replace(SERVED, replace=MINE),
    ".venv/bin/python -m benchmark.quality --model DIR --texts DIR xshare:k0=1,add=24 oea:k0=3": OWN_QUALITY,
    ".venv/bin/python -m benchmark.quality xshare:k0=1,add=24 custom:k0=1,budget=32,ranking=votes": QUALITY,
    ".venv/bin/python -m benchmark.quality xshare:k0=1,add=24 mine:budget=32": replace(QUALITY, replace=MINE),
    "python -m training.train_moe": TRAINED,
    "python -m training.train_moe --model grouped": TRAINED,
    **{
        f"python -m training.train_moe --model {words}": BUILT
        for words in (
            *("wide", "biased", "many128", "many512", "grouped --seed 2 --steps 400", "many128 --seed 2 --steps 200"),
            *("wide --seed 2 --steps 250", "biased --seed 2 --steps 160"),
        )
    },
    "python -m training.train_eagle3": TRAINED,
    # on a GPU
    **{
        f"make gpu{words}": NO_GPU
        for words in (
            *("", " QUICK=1", " EXPERIMENT=eagle3", " EXPERIMENT=levers PARTS=policies"),
            *(" EXPERIMENT=selection PARTS=times", " EXPERIMENT=tune POLICY=oea:k0=3"),
            *(f" EXPERIMENT=server PARTS=gpt-oss-120b{more}" for more in ("", "-no-warm-up")),
        )
    },
    "make gpu-bundle FROM=DIR": Run(SCRATCH, status=1, shows=r"gpu-bundle: FROM=.* no site\.tar\.xz"),
    "scripts/gpu/make_site.sh DIR": Run(SCRATCH, status=1, shows=r"make_site: PYTHON must be a Python 3\.12 \(got "),
    "scripts/gpu/pack_triton.sh CACHE": Run(
        {"CACHE": "{scratch}/none"}, status=1, shows=r"pack_triton: CACHE must be a folder, .* \(got .*none\)"
    ),
    "python -m benchmark.gpu table --out DIR": Run(SCRATCH, status=1, shows="no record with a point there"),
    "SGLANG_MOE_CONFIG_DIR=RESULTS/moe-configs"
    " sglang serve --model-path Qwen/Qwen3-30B-A3B --expert-policy xshare": Serve(QWEN, CPU),
    "mkdir -p build/moe-configs": Run({"build/": "{scratch}/"}),
    "cp -r $(python -c 'import sglang; print(sglang.__path__[0])')/srt/layers/moe/moe_runner/triton_utils/configs"
    " build/moe-configs": Run({"build/moe-configs": "{scratch}"}),
    "cp -r RESULTS/moe-configs/configs build/moe-configs": Run(
        {"RESULTS/moe-configs/configs": "examples", "build/moe-configs": "{scratch}"}
    ),
}

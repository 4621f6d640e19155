"""An adapter for lm-evaluation-harness. All calls of the harness are in this module."""

import importlib.util
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from benchmark.common.variant import parse_variant
from benchmark.evaluation.report import Score, read_scores
from sglang_xshare.live.client import Client

TASKS = Path(__file__).parent / "tasks"
MISSING = "lm-evaluation-harness is not installed here; `make eval` installs it"


@dataclass(frozen=True)
class Pass:
    """The results of one pass: the scores, the number of generated tokens and the time in seconds."""

    scores: list[Score]
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Endpoint:
    """The server to evaluate.

    `concurrency` is the number of requests at a time. If `chat` is true, the model's chat template is applied.
    """

    url: str
    model: str
    concurrency: int
    chat: bool = False
    api_key: str | None = None


class Harness:
    """A set of tasks of lm-evaluation-harness. Raises ValueError if a task cannot run.

    `names` contains the names of tasks or the paths of YAML files.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise ValueError(MISSING)
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        from lm_eval.tasks import TaskManager

        self._manager = TaskManager(include_path=TASKS, include_defaults=False)
        if not all(self._knows(name) for name in names):
            self._manager = TaskManager(include_path=TASKS)  # slow, because it reads about 10,000 files
        for name in names:
            self._check(name)

    def run(self, name: str, endpoint: Endpoint, limit: int | None, shots: int | None) -> Pass:
        """Run a task on its first `limit` documents.

        `shots` is the number of examples before each document. If it is None, the task's own number is used.
        """
        from lm_eval.evaluator import simple_evaluate

        model = _connect(endpoint)
        results = simple_evaluate(
            model,
            tasks=[name],
            limit=limit,
            num_fewshot=shots,
            apply_chat_template=endpoint.chat,
            task_manager=self._manager,
        )
        return Pass(read_scores(results), model.tokens, model.seconds)

    def _knows(self, name: str) -> bool:
        return name in self._manager.all_tasks or (name.endswith((".yaml", ".yml")) and Path(name).is_file())

    def _check(self, name: str) -> None:
        if not self._knows(name):
            near = get_close_matches(name, self._manager.all_tasks, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"task {name}: lm-evaluation-harness has no such task{hint}")
        try:
            tasks: Mapping[str, Any] = self._manager.load([name])["tasks"]
        except Exception as error:  # downloading a task can raise any type of exception
            raise ValueError(f"task {name}: {' '.join(str(error).split())[:300]}") from None
        for task in tasks.values():
            kind = task.get_config("output_type")
            if kind != "generate_until":
                reason = f"got {kind}, which is scored in prefill, where no policy selects"
                raise ValueError(f"task {name} must generate ({reason})")


def _connect(endpoint: Endpoint) -> Any:
    """Return the harness's client for an OpenAI-compatible server. The client also counts tokens and seconds."""
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    client = LocalChatCompletion if endpoint.chat else LocalCompletionsAPI

    class Counting(client):  # type: ignore[misc, valid-type]
        tokens, seconds = 0, 0.0

        def generate_until(self, *args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return super().generate_until(*args, **kwargs)
            finally:
                self.seconds += time.monotonic() - began

        def parse_generations(self, outputs: Any, **kwargs: Any) -> Any:
            answers = outputs if isinstance(outputs, list) else [outputs]
            self.tokens += sum(answer["usage"]["completion_tokens"] for answer in answers)
            return super().parse_generations(outputs=outputs, **kwargs)

        @property
        def api_key(self) -> str:
            return endpoint.api_key or ""

    return Counting(
        base_url=f"{endpoint.url}/v1/{'chat/completions' if endpoint.chat else 'completions'}",
        model=endpoint.model,
        tokenizer_backend=None,  # the server tokenizes
        tokenized_requests=False,
        num_concurrent=endpoint.concurrency,
        timeout=3600,
    )


def run_arm(
    harness: Harness, endpoint: Endpoint, task: str, policy: str, limit: int | None, shots: int | None
) -> dict[str, Any]:
    """Switch the server to a policy, empty its cache and run a task. Raises `PolicyError` or RuntimeError.

    Return these results:

    - `scores`: the fields of each `Score`.
    - `tokens` and `seconds`: the number of generated tokens and their time.
    - `experts_before` and `experts_after`: the mean number of active experts per layer and step, with the model's own
      routing and with the policy. They are None if the server has not counted experts.
    - `kept_mass`: the mean share of the gating mass that the policy keeps, or None.
    - `policy_steps`: the number of forwards that used the policy.
    """
    client = Client(endpoint.url, endpoint.api_key)
    client.set_policy(parse_variant(policy).body())
    client.flush()
    try:
        done = harness.run(task, endpoint, limit, shots)
    except Exception as error:  # after its retries, the harness's client can raise any type of exception
        raise RuntimeError(
            f"task {task}, {policy}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from None
    since = client.get_policy()["since_switch"]
    counted = bool(since["layer_steps"])
    means = {"experts_before": "mean_before", "experts_after": "mean_after", "kept_mass": "mean_kept_mass"}
    return {
        **{"task": task, "policy": policy, "scores": [asdict(score) for score in done.scores]},
        **{"tokens": done.tokens, "seconds": done.seconds},
        **{name: since[mean] if counted else None for name, mean in means.items()},
        "policy_steps": since["outcomes"].get("policy", 0),
    }

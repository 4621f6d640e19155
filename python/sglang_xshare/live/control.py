"""A scheduler's answers to GET and POST /expert_policy: the active policy, and a switch between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..compatibility.layers import check_plans
from ..compatibility.modes import check_observed
from ..compatibility.moe_model import read_model
from ..compatibility.schedule import check_schedule, find_missed
from ..policies.keys import as_json
from ..policies.schedule import Schedule, build_schedule
from ..stage.in_force import InForce
from ..stage.paged import SlotsExceeded
from ..stage.record.counters import KEPT, Reader
from ..stage.reports import Reports
from ..stage.stage import LastSwitch
from ..stage.switch import check_graphs, make_next, refresh, switch
from ..upstream.graphs import check_memory
from ..upstream.ranks import is_first_rank
from ..upstream.server import attention_dp_size, is_speculative, model_config, pages_experts, resolved
from . import ADDED, ASKED, COUNTING_PERIOD, FAULT, NO_STAGE, PATH

if TYPE_CHECKING:
    from ..depth.report import DepthReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """A switch that has passed its check and waits for its commit.

    `epoch` identifies the POST. A commit with the same epoch makes the switch. `switches` is the number of switches at
    the time of the check. If this number has changed, the commit is refused. `latter` is the new policy.
    """

    epoch: str
    switches: int
    latter: InForce
    is_trial: bool
    recaptures: bool
    warnings: list[str]


@dataclass(frozen=True)
class Former:
    """The policy that was active before the commit of `epoch`, and the switch that had activated this policy."""

    epoch: str
    in_force: InForce
    last_switch: LastSwitch


class Control:
    """The answers of one scheduler to control messages about its stage.

    Every rank handles the same messages in the same order between its steps, and all ranks check the same values. So
    all ranks switch between the same two steps, or no rank switches.
    """

    def __init__(self, reports: Reports, server_args: Any) -> None:
        self.reports, self.stage = reports, reports.stage
        self.server_args = server_args
        self._has_checked_effect = False
        self._checked: Checked | None = None
        self._former: Former | None = None
        self._latest: tuple[float, int, dict[str, Any]] | None = None
        """The last read of the counters: its time, the number of switches at that time, and the counters."""

    def get(self) -> dict[str, Any]:
        """Return the policy and its keys in the form that POST accepts, and further fields (see `ADDED`).

        The counters are read at most once in `COUNTING_PERIOD` seconds, because a read waits for the device. Between
        two reads, the result contains the counters of the last read. `counted_ago` is their age in seconds.
        """
        stage = self.stage
        if stage.in_force.batches.most is None:  # SGLang has decided the sizes, but the stage has not read them
            stage.update_batches()
        in_force = stage.in_force
        # All ranks of data-parallel attention count the same steps, so only the first rank reports the counts.
        counts = is_first_rank()
        router = stage.layers[0].router
        return in_force.given | {
            "in_force": in_force.description,
            "plan_hash": in_force.hash,
            "exact_rule": in_force.rule.given,
            "limits": {
                "moe_layers": [layer.layer_id for layer in stage.layers],
                "batches": str(in_force.batches),
                "captured_rows": list(stage.graphs.rows),
                "selecting_rows": stage.graphs.selecting,
                "most_rows": in_force.batches.most,
                "router": {"top_k": router.top_k, "renormalize": router.renormalize},
            },
            **(self._read_counters() if counts else dict.fromkeys(("counters", "since_switch", "counted_ago"))),
            **self._count_switches(),
            "disagreement": stage.last_switch.disagreement,
            "trial": stage.last_switch.is_trial,
            "estimated_acceptance": stage.acceptance.estimate,
        }

    def check(self, body: Mapping[str, Any], epoch: str) -> dict[str, Any]:
        """Check a switch to the policy in `body`. Store the switch for the commit of the same `epoch`.

        The active policy does not change. `body` contains "policy", the keys of --expert-policy-config, and optionally
        "trial" and "recapture". Return the same numbers of switches as `get`. Raises ValueError, with a message of one
        line, if the switch is refused.
        """
        self._checked = None  # all schedulers clear it, even if only one of them refuses this check
        schedule, is_trial, recaptures = self._read(body), body.get("trial", False), body.get("recapture", True)
        if type(is_trial) is not bool:
            raise ValueError(f"trial must be true or false (got {as_json(is_trial)})")
        if type(recaptures) is not bool:
            raise ValueError(f"recapture must be true or false (got {as_json(recaptures)})")
        warnings = self._check_as_at_start(schedule)
        rule = self.stage.in_force.rule
        latter = make_next(self.stage, schedule, rule if is_trial else None)
        if check_graphs(self.stage, latter, recaptures) is None:
            check_memory(self.reports.reporter.scheduler)
        if latter.rule != rule and latter.schedule is not None and "exact" not in latter.schedule.given:
            reason = "from now on a request is exact only if it sets expert_policy; to keep the rule, send exact again"
            warnings.append(f"exact: this policy does not have {as_json(rule.given)} of the previous policy: {reason}")
        switches = self.stage.last_switch.number
        self._checked = Checked(epoch, switches, latter, is_trial, recaptures, warnings)
        return self._count_switches()

    def commit(self, epoch: str, number: int) -> dict[str, Any]:
        """Make the switch that `check` has stored for the same epoch.

        The switch gets the given `number`. Return the answer of `get` with warnings. Raises ValueError, and changes
        nothing, if the last check had another epoch, or if the policy was switched after the check. If the switch
        itself raises, the caller must call `restore` on all ranks, because all ranks must make the same number of
        switches.
        """
        stage, checked = self.stage, self._checked
        self._begin_comparing()
        if checked is None or checked.epoch != epoch:
            raise ValueError("another client switches the policy at the same time; ask again")
        if checked.switches != stage.last_switch.number:
            raise ValueError("the policy changed after the check; ask again")
        self._former = Former(epoch, stage.in_force, stage.last_switch)
        last_switch = LastSwitch(number, posted=number, is_trial=checked.is_trial)
        seconds = switch(self.reports, refresh(stage, checked.latter), last_switch, checked.recaptures)
        for warning in checked.warnings:
            logger.warning(warning)
        captured = {"recaptured": seconds is not None, "recapture_seconds": seconds}
        answer = self.get() | {"warnings": checked.warnings} | captured
        self._latest = None  # the next GET reads the new policy's counters
        return answer

    def restore(self, epoch: str, number: int) -> dict[str, Any]:
        """Undo the commit of `epoch`, even if the commit has failed halfway.

        The switch back gets the given `number`. If the last commit on this scheduler had another epoch, do nothing.
        Return whether the previous policy was restored.
        """
        former = self._former
        self._begin_comparing()
        if former is None or former.epoch != epoch:
            return {"restored": False}
        # After two failed captures a third capture would fail too, so the policy is restored without graphs.
        recaptures = not self.stage.graphs.lost
        last_switch = replace(former.last_switch, number=number, posted=number)
        switch(self.reports, refresh(self.stage, former.in_force), last_switch, recaptures)
        return {"restored": True}

    def _begin_comparing(self) -> None:
        """Restart the comparison of ranks. Call this method before any code that can raise.

        Every rank must restart the comparison, even if its switch fails, because all ranks compare after the same
        forward.
        """
        if self.stage.agreement is not None:
            self.stage.agreement.begin()

    def warn_if_without_effect(self) -> None:
        """Log a warning if the policy cannot act in any step. Only the first call checks this.

        The checks at the start cannot find this, because SGLang decides later how many requests run at once.
        """
        if self._has_checked_effect:
            return
        self._has_checked_effect = True
        schedule = self.stage.in_force.schedule
        for part in schedule.parts if schedule else ():
            batches = self.stage.find_batches(part.rows)
            if (missed := find_missed(part, batches)) and is_first_rank():
                reason = f"this server's steps have other numbers of rows ({batches}), so every step stays vanilla"
                logger.warning("--expert-policy %s: %s: %s", part.policy, missed, reason)

    def _read(self, body: Mapping[str, Any]) -> Schedule | None:
        """Return the schedule of a POST, or None for vanilla. Raises ValueError if the keys are not a valid policy."""
        keys = {name: value for name, value in body.items() if name not in (*ADDED, *ASKED)}
        if "policy" not in keys:
            raise ValueError('policy must be given, in an object such as {"policy": "xshare", "k0": 1, "add": 6}')
        name = keys.pop("policy")
        if name in (None, "none"):
            name = "vanilla"
        return build_schedule(name, keys, is_speculative(self.server_args), pages=pages_experts(self.server_args))

    def _check_as_at_start(self, schedule: Schedule | None) -> list[str]:
        """Return the warnings that the server would log if it started with this schedule.

        Raises ValueError if the server would refuse to start.
        """
        config = resolved(self.server_args)
        if attention_dp_size(config) > 1 and config.enable_dp_attention_local_control_broadcast:
            flag = "--enable-dp-attention-local-control-broadcast"
            raise ValueError(f"{flag}: ranks would switch at different steps; must be off")
        check_observed(schedule)
        if schedule is None:
            return []
        if schedule.observed and self.stage.in_force.masks:
            raise ValueError("--mask-padding-experts with observe: observe routes like the model; use another policy")
        model = read_model(model_config(self.server_args), self.server_args.model_path)
        _, warnings = check_schedule(schedule, model, config, find_batches=self.stage.find_batches)
        plans = schedule.plans([layer.layer_id for layer in self.stage.layers])
        for layer in self.stage.layers:
            check_plans(layer, plans, config)
        return warnings

    def _count_switches(self) -> dict[str, Any]:
        """Return how often this scheduler has switched, and how often it has switched by itself since the last POST.

        A scheduler switches to vanilla by itself if ranks disagree. The second number is for all ranks together. The
        first rank reports it, and it is None on all other ranks.
        """
        last = self.stage.last_switch
        return {"switches": last.number, "own_switches": last.number - last.posted if is_first_rank() else None}

    def _read_counters(self) -> dict[str, Any]:
        """Return the counters since the start and since the last switch. `counted_ago` is their age in seconds."""
        stage, now = self.stage, time.monotonic()
        switches = stage.last_switch.number
        if self._latest is None or now - self._latest[0] >= COUNTING_PERIOD or switches != self._latest[1]:
            readers = {"counters": Reader(stage.acting.counters), "since_switch": stage.acting.since_switch}
            counts = {name: self._count(reader) for name, reader in readers.items()}
            self._latest = now, switches, counts
        at, _, counts = self._latest
        return counts | {"counted_ago": now - at}

    def _count(self, reader: Reader) -> dict[str, Any]:
        """Wait for the device, and return the counts since the last read of `reader`, in total and by MoE layer."""
        interval, rows = reader.look()
        names = self.stage.acting.counters.names
        layers = [
            {"layer": layer.layer_id} | {name: int(row[names[name]]) for name in names} | {"kept_mass": row[KEPT]}
            for layer, row in zip(self.stage.layers, rows, strict=True)
        ]
        return asdict(interval) | {"by_layer": layers}


def handle(control: Control | None, depth: DepthReport | None, request: Any) -> Any:
    """Return the answer to a control message as SGLang's output object.

    Raises `SlotsExceeded`, because the server must end then. Any other error becomes a refusal, because an exception
    would end the scheduler.

    `control` is None on a server without a policy. `depth` is None on a server that does not choose the draft depth. A
    server with only `depth` answers GET, but not POST.
    """
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    try:
        if control is not None:
            answer = _ask(control, request.body)
        elif depth is not None and not request.body:
            answer = {"policy": "vanilla", "in_force": {"policy": "vanilla"}}
        else:
            raise ValueError(NO_STAGE)
        if depth is not None and "in_force" in answer:
            answer["draft_depth"] = depth.describe()
        return DumperControlReqOutput(success=True, response=[answer])
    except ValueError as error:  # includes `ExpertPolicyError`
        return DumperControlReqOutput(success=False, response=[], error=" ".join(str(error).split()))
    except SlotsExceeded:  # wrong outputs were computed before this message, so the server must end
        raise
    except Exception as error:
        logger.exception("%s %s", "POST" if request.body else "GET", PATH)
        return DumperControlReqOutput(success=False, response=[FAULT], error=f"{type(error).__name__}: {error}")


def _ask(control: Control, body: Mapping[str, Any]) -> dict[str, Any]:
    if not body:
        return control.get()
    match body:
        case {"check": dict(policy), "epoch": str(epoch)}:
            return control.check(policy, epoch)
        case {"commit": str(epoch), "number": int(number)}:
            return control.commit(epoch, number)
        case {"restore": str(epoch), "number": int(number)}:
            return control.restore(epoch, number)
    raise ValueError(f"a message must be a check, a commit or a restore (got {as_json(body)})")

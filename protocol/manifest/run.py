"""The run manifest: one TOML file that describes a whole run, parsed, checked and named by its hash.

The run id is the SHA-256 of the canonical form: sorted JSON of every value, defaults filled in. It leaves out the
bootstrap addresses and the table [about], which inform people and may change while the run lives, the table [host],
which concerns one machine, the place of the first weights (their hashes are in it), those keys of
`DEFAULTS_OUTSIDE_RUN_ID` that have their default, and [pipeline] in a run with one stage.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import (
    model_validator,
)

from protocol.fault_words import shorten
from protocol.manifest.model import (
    DEFAULT_BALANCE_LOSS,
    DEFAULT_MODEL_KIND,
    DEFAULT_NORM_EPSILON,
    HUB_SCHEME,
    ModelSection,
)
from protocol.manifest.sections import (
    DEFAULT_KEEPERS,
    AboutSection,
    AdapterSection,
    AdmissionSection,
    AnnealSection,
    AuditSection,
    CheckpointSection,
    DataSection,
    HostSection,
    MembershipSection,
    MethodSection,
    PipelineSection,
    ReinforcementSection,
    RoundSection,
    RunSection,
    Section,
    TargetSection,
    TrainSection,
)
from protocol.scored_tasks import TASKS

RunId = str  # 64 hexadecimal digits
DEFAULTS_OUTSIDE_RUN_ID: tuple[tuple[str, str, object], ...] = (  # runs older than these keys keep their id
    ("model", "kind", DEFAULT_MODEL_KIND),
    ("model", "head_size", None),
    ("model", "norm_epsilon", DEFAULT_NORM_EPSILON),
    ("model", "experts", None),
    ("model", "experts_per_token", None),
    ("model", "normalize_experts", True),
    ("model", "balance_loss", DEFAULT_BALANCE_LOSS),
    ("model", "weights", []),
    ("model", "subspace", None),
    ("model", "rope_scaling", None),
    ("model", "tensors", []),
    ("model", "document_end", None),
    ("data", "sources", []),
    ("data", "phases", []),
    ("data", "weights", None),
    ("data", "chat", None),
    ("run", "organiser_key", ""),
    ("method", "modules", []),
    ("target", "keepers", DEFAULT_KEEPERS),
    ("audits", "share", 0.0),
    ("pipeline", "audit_share", 0.0),
    ("pipeline", "speeds", []),
    ("train", "memory", "normal"),
    ("anneal", "share", 0.0),
    ("anneal", "final_share", 0.0),
)


class Manifest(Section):
    """A whole run."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    method: MethodSection
    round: RoundSection = RoundSection()
    pipeline: PipelineSection = PipelineSection()
    admission: AdmissionSection = AdmissionSection()
    membership: MembershipSection = MembershipSection()
    checkpoint: CheckpointSection = CheckpointSection()
    target: TargetSection = TargetSection()
    audits: AuditSection = AuditSection()
    anneal: AnnealSection = AnnealSection()
    adapter: AdapterSection | None = None
    rl: ReinforcementSection | None = None
    about: AboutSection = AboutSection()
    host: HostSection = HostSection()

    @model_validator(mode="after")
    def _adapter_fits_the_model(self) -> Self:
        """Check the adapter, and hand it to the model: all that depends on the trained vector reads the model."""
        if self.adapter is None:
            return self
        if self.model.is_custom or not self.model.weights:
            raise ValueError("adapter needs the weights of the model that it changes; name their folder in model.from")
        if self.pipeline.is_cut:
            raise ValueError("adapter needs pipeline.stages = 1")
        if self.model.experts and not {"gate_proj", "up_proj", "down_proj"}.isdisjoint(self.adapter.targets):
            raise ValueError(
                "adapter.targets of a model with experts are q_proj, k_proj, v_proj and o_proj; write some"
            )
        self.__dict__["model"] = self.model.with_adapter(self.adapter)
        return self

    @model_validator(mode="after")
    def _rl_fits_the_run(self) -> Self:
        if self.rl is None:
            return self
        if self.model.is_custom:
            raise ValueError('rl needs a model of murmur; with model.kind = "custom" each loop is its organiser\'s own')
        if self.pipeline.is_cut:
            raise ValueError("rl needs pipeline.stages = 1")
        if self.audits.share:
            raise ValueError("rl needs audits.share = 0: nobody repeats steps whose groups another trainer owned")
        if self.rl.answer_tokens >= self.model.context:
            raise ValueError("rl.answer_tokens must be below model.context, which holds the question as well")
        task = TASKS.get(self.rl.task)
        if task is None and not self.method.modules:
            raise ValueError(f"rl.task: write one of {', '.join(TASKS)}, or name the module of yours in method.modules")
        if task is not None and self.rl.version != task.version:
            raise ValueError(f"rl.version: this program has version {task.version} of {task.name}; write it, or update")
        return self

    @model_validator(mode="after")
    def _organiser_signs_tickets(self) -> Self:
        if self.admission.mode == "tickets" and not self.run.organiser_key:
            raise ValueError('admission.mode = "tickets" needs run.organiser_key, whose tickets count')
        return self

    @model_validator(mode="after")
    def _own_models_have_own_data(self) -> Self:
        if self.model.is_custom and self.data.source != "own":
            raise ValueError('data.source must be "own" with model.kind = "custom": each training loop brings its data')
        if self.model.is_custom and self.pipeline.is_cut:
            raise ValueError('pipeline.stages must be 1 with model.kind = "custom"')
        return self

    @model_validator(mode="after")
    def _batch_holds_a_sequence(self) -> Self:
        if self.model.is_custom:
            return self
        if self.train.batch_tokens % self.model.context:
            raise ValueError("train.batch_tokens must be a multiple of model.context")
        if self.model.document_end is not None and self.pipeline.is_cut:
            raise ValueError("model.document_end needs pipeline.stages = 1, as middle stages do not see the tokens")
        if self.data.chat is not None and self.pipeline.is_cut:
            raise ValueError("data.chat needs pipeline.stages = 1, as stages count every token")
        self.pipeline.require_fit(self.train.batch_tokens, self.model.context, self.model.stream_width)
        self.pipeline.require_exact_fit(self.data.mixture, self.train.batch_tokens, self.model.context)
        return self

    def canonical(self) -> bytes:
        values = self.model_dump(mode="json")
        del values["run"]["bootstrap"], values["about"], values["host"], values["model"]["from"]
        for section, key, default in DEFAULTS_OUTSIDE_RUN_ID:
            if values[section].get(key) == default:
                values[section].pop(key, None)
        for section in ("adapter", "rl"):
            if values[section] is None:
                del values[section]
        for section in ("audits", "anneal"):
            if not values[section]:
                del values[section]
        if not self.pipeline.is_cut:
            del values["pipeline"]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    def source_weights(self, rounds: int, tokens: int) -> tuple[float, ...]:
        """Return the weights of the sources of text after `rounds` and `tokens`."""
        return self.data.weights_at(self.target.progress(rounds, tokens), tokens)

    def rate_factor(self, rounds: int, tokens: int) -> float:
        """Return the factor of the learning rate after `rounds` and `tokens`: of the final anneal and of [rl]."""
        scores = self.rl.rate_factor if self.rl is not None and self.rl.has_begun(rounds) else 1.0
        return scores * self.anneal.rate_factor(self.target.progress(rounds, tokens))

    @property
    def run_id(self) -> RunId:
        """Return the id under which peers make rounds: that of the run, or of one stage of it."""
        return self.whole_run_id

    @property
    def whole_run_id(self) -> RunId:
        """Return the id of the run, which tickets and revisions name."""
        return hashlib.sha256(self.canonical()).hexdigest()

    def published(self) -> Self:
        """Return the manifest as others get it, without what concerns this machine alone."""
        shared = self.model_copy(update={"host": HostSection()})
        if self.adapter is not None and self.model.from_.startswith(HUB_SCHEME):
            return shared  # each of them needs the frozen weights, and finds them there
        return shared.with_base_model("")

    def with_whole_path(self, base: Path) -> Self:
        """Return the manifest with the whole path of the weights that its adapter changes: its copies need them too."""
        source = self.model.from_
        if self.adapter is None or not source or source.startswith(HUB_SCHEME):
            return self
        return self.with_base_model(str(base.resolve() / Path(source).expanduser()))

    def with_base_model(self, source: str) -> Self:
        """Return the manifest for a machine with the weights in another place, which the run id leaves out."""
        return self.model_copy(update={"model": self.model.model_copy(update={"from_": source})})

    def to_toml(self) -> str:
        values = self.model_dump(mode="json", exclude_none=True)
        if self.host == HostSection():
            del values["host"]
        return tomli_w.dumps(values)


def changed_keys(old: Manifest, new: Manifest) -> list[str]:
    """Return the keys of the run id whose values differ, such as `train.learning_rate 0.003 -> 0.001`."""
    before, after = (_flatten(json.loads(manifest.canonical())) for manifest in (old, new))
    return [
        f"{key} {_shown(before.get(key))} -> {_shown(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _shown(value: object) -> str:
    return "none" if value is None else shorten(json.dumps(value, ensure_ascii=False), 40)

"""The settings of a server and of its engine, each declared once.

A field's name is its key in a YAML file, its environment variable with `GRADWIRE_` before it, and its flag of `gradwire
serve` with dashes (flags that repeat are singular: `--model` adds to `models`). The flags, their help and defaults are
made from the fields (:mod:`gradwire_server.cli.settings`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from posixpath import normpath
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, field_validator, model_validator

from gradwire_server.engine_link.vitals import STALE_S
from gradwire_server.limits import Limits


class EngineChoice(BaseModel):
    """The settings of one engine that differ from those of the server.

    Attributes:
        models: Names of the models that it serves; empty for all that the server names.
        ranks, device, dtype, quantize: As the server's settings of these names; None for the server's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[str, ...] = ()
    ranks: int | None = Field(None, ge=1, le=64)
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "mixed", "float64"] | None = None
    quantize: Literal["nf4", "int8"] | None = None

    def settings(self, server: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's settings, given the server's."""
        own = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        own["models"] = {name: server["models"][name] for name in self.models or server["models"]}
        return {**server, **own}


def parse_engine(text: str) -> dict[str, Any]:
    """The choice ``model=A,ranks=2``; ``model`` may stand several times.

    Raises:
        ValueError: The text has another form.
    """
    settings: dict[str, Any] = {"models": []}
    for part in text.split(","):
        name, separator, value = (each.strip() for each in part.partition("="))
        if not (separator and value) or name not in ("model", *EngineChoice.model_fields.keys() - {"models"}):
            rule = "model=NAME, ranks=N, device=D, dtype=T, quantize=Q"
            raise ValueError(f"--engine {text[:100]}: {part.strip()[:50]!r} is none of {rule}")
        if name == "model":
            settings["models"].append(value)
        elif name in settings:
            raise ValueError(f"--engine {text[:100]}: {name} stands there twice")
        else:
            settings[name] = value
    return settings


CHUNK_BYTES = 1 << 20
"""The most that one frame of a stream carries."""

STORE_SCHEMES = ("s3", "gs", "az", "file")
MAX_ENGINES = 64
MAX_RANKS = 64
HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")

TRAINED_BYTES = 16
"""Memory that a trained parameter takes: float32 weight, gradient and two moments."""


T = TypeVar("T")
Several = Annotated[tuple[T, ...], BeforeValidator(lambda given: _split(given) if isinstance(given, str) else given)]
"""Several values, which a text separates with commas."""


def _number_or_auto(given: object, most: int, what: str, least: int = 1) -> object:
    text = str(given)
    if text == "auto" or (text.isdigit() and least <= int(text) <= most):
        return int(text) if text.isdigit() else text
    raise ValueError(f"give a number of {what} from {least} to {most}, or auto, not {text[:20]!r}")


def setting(default: Any, description: str, *, subject: str, **bounds: Any) -> Any:
    """A field of the settings.

    Args:
        default: checked like any other value.
        description: the flag's help.
        subject: the heading under which `gradwire serve --help` lists the flag.
        bounds: of pydantic's `Field`, as ``ge``.
    """
    return Field(default=default, validate_default=True, description=description,
                 json_schema_extra={"subject": subject}, **bounds)  # fmt: skip


MODELS, COMPUTE, DURABILITY = "Models and losses", "Compute and memory", "State and durability"
NETWORK, OBSERVABILITY = "Network and access", "Observability"


class EngineSettings(BaseModel):
    """The settings of the engine's process, which gets them as one JSON document."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: dict[str, str] = setting({}, "Hugging Face name, folder, or NAME=FOLDER; repeat for more.", subject=MODELS)
    allow_models: dict[str, str] = setting(
        {}, "A model that is loaded when a client first names it; as --model; repeat.", subject=MODELS
    )
    losses: Several[Path] = setting((), "A Python file that registers losses; repeat for more.", subject=MODELS)
    state_dir: Path = setting(
        Path("gradwire-state"), "Folder of runs, checkpoints and the journal.", subject=DURABILITY
    )
    store: str = setting(
        "",
        "Where checkpoints, exports and uploads are, for engines on several machines: file:///FOLDER that they share,"
        " or s3://BUCKET/PREFIX, gs:// or az:// (gradwire[store]). The state folder when absent.",
        subject=DURABILITY,
    )
    store_cache: ByteSize | None = setting(
        None,
        "Disk of this machine for what was written to an object store and read from it lately. 32 GiB when absent.",
        subject=DURABILITY,
    )
    store_patience: float = setting(
        60.0,
        "Seconds for which an object store may not answer before an operation fails.",
        subject=DURABILITY,
        gt=0,
        allow_inf_nan=False,
    )
    device: str = setting(
        "",
        "cpu, cuda or cuda:1; the best there is when absent.",
        subject=COMPUTE,
    )
    ranks: int | Literal["auto"] = setting(
        "auto",
        "Processes of an engine, one a GPU, that share the work of each run: a power of two; auto: the fewest on which"
        " the models fit by `gradwire estimate`.",
        subject=COMPUTE,
    )
    min_ranks: int = setting(
        0,
        "Go on with fewer ranks, a power of two from so many on, where an engine of all of them does not start again;"
        " 0: never.",
        subject=COMPUTE,
        ge=0,
    )
    shard: Literal["auto", "on", "off"] = setting(
        "auto",
        "Divide the weights of each model among the ranks; auto: where a whole copy does not fit each of them.",
        subject=COMPUTE,
    )
    dtype: Literal["float32", "bfloat16", "mixed", "float64"] | None = setting(
        None,
        "float32; bfloat16, trained with float32 masters, as on a GPU when absent; mixed: bfloat16 arithmetic over "
        "float32 weights.",
        subject=COMPUTE,
    )
    quantize: Literal["nf4", "int8"] | None = setting(
        None,
        "Hold the linear layers of shared base models in 4 or 8 bits (gradwire[quantize]); LoRA runs only.",
        subject=COMPUTE,
    )
    compile: bool = setting(
        False, "torch.compile the models' layers: minutes at first, faster steps then.", subject=COMPUTE
    )
    kernels: Literal["auto", "plain"] = setting(
        "auto",
        "auto: norms, gated activations and rotary embeddings by kernels that agree with transformers (liger-kernel's "
        "on a GPU with gradwire[kernels], our own on a CPU with a C compiler, there attention and a sampler's products "
        "too), sampled tokens by graphs of kernels, or on a CPU recorded forwards; plain: as transformers does.",
        subject=COMPUTE,
    )
    deterministic: bool = setting(
        False,
        "Runs are deterministic unless they say otherwise: the bits of a log-probability depend on its own row alone,"
        " and are the same in sampling, scoring and training; on a CPU with a C compiler, in float32 or bfloat16.",
        subject=COMPUTE,
    )
    sampler: Literal["local", "vllm"] = setting(
        "local", "What generates: the engine itself, or vLLM (gradwire[vllm], a GPU).", subject=COMPUTE
    )
    speculate: Literal["auto", "on", "off"] = setting(
        "auto",
        "Let the local sampler draft tokens that a sample's own context foretells, and compute several at once; auto: "
        "where tokens and log-probabilities stay the same to the bit; on: also where neighbours change the last bits.",
        subject=COMPUTE,
    )
    group_runs: Literal["auto", "on", "off"] = setting(
        "auto", "Small batches of several LoRA runs on one base at once; auto: on a GPU.", subject=COMPUTE
    )
    microbatch_tokens: int | None = setting(None, "Tokens of one micro-batch.", subject=COMPUTE, ge=1)
    activation_budget_gib: float | None = setting(
        None, "GiB for kept graphs.", subject=COMPUTE, gt=0, allow_inf_nan=False
    )
    reference_cache_gib: float = setting(8.0, "GiB for reference models.", subject=COMPUTE, gt=0, allow_inf_nan=False)
    run_memory: ByteSize | None = setting(
        None,
        'Memory of runs on the device, as "24 GiB"; idle LoRA runs beyond it leave. Half of the device\'s when absent.',
        subject=COMPUTE,
    )
    run_host_memory: ByteSize | None = setting(
        None,
        "Host memory of runs that are not on the device; those beyond it go to disk. A quarter of the machine's when "
        "absent.",
        subject=COMPUTE,
    )
    sampling_cache: ByteSize | None = setting(
        None,
        'Memory of the local sampler\'s keys and values, as "8 GiB": those in progress, samples beyond it wait, and '
        "known ones for prompts that begin alike. An eighth of the device's when absent.",
        subject=COMPUTE,
    )
    share_prefixes: bool = setting(
        False,
        "Known prompts' beginnings of base models serve all API keys. Each can then learn, by time and cached_tokens, "
        "what another has asked.",
        subject=COMPUTE,
    )
    threads: int | None = setting(None, "CPU threads of the engine.", subject=COMPUTE, ge=1)
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", "info has a line an operation.", subject=OBSERVABILITY
    )
    log_format: Literal["text", "json"] = setting("text", "json: an object a line.", subject=OBSERVABILITY)
    traces: str = setting("", "OTLP/gRPC endpoint of OpenTelemetry traces; off when absent.", subject=OBSERVABILITY)

    @field_validator("models", "allow_models", mode="before")
    @classmethod
    def _with_names(cls, given: object) -> object:
        """A mapping of names to folders stays; a list, or text with commas, is named by :func:`parse_model`."""
        return _named(given) if isinstance(given, str | list | tuple) else given

    @field_validator("losses", "state_dir", "tls_cert", "tls_key", "tls_client_ca", check_fields=False)
    @classmethod
    def _absolute(cls, given: Path | tuple[Path, ...] | None) -> Path | tuple[Path, ...] | None:
        if isinstance(given, tuple):
            return tuple(path.expanduser().resolve() for path in given)
        return given and given.expanduser().resolve()

    @field_validator("store")
    @classmethod
    def _known_store(cls, url: str) -> str:
        scheme, separator, rest = url.partition("://")
        if url and (not separator or scheme not in STORE_SCHEMES or not rest.strip("/")):
            raise ValueError(f"give {', '.join(f'{name}://...' for name in STORE_SCHEMES)}, not {url!r}")
        if scheme == "file" and not rest.startswith("/"):
            raise ValueError(f"{url!r} does not name a folder from the root: file:///mnt/gradwire, with three slashes")
        return url.rstrip("/")

    @field_validator("ranks", mode="before")
    @classmethod
    def _ranks_or_auto(cls, given: object) -> object:
        return _number_or_auto(given, MAX_RANKS, "ranks")

    @model_validator(mode="after")
    def _fewer_ranks_are_some(self) -> Self:
        fewest = self.min_ranks
        if fewest and (self.ranks == "auto" or fewest > self.ranks or fewest & (fewest - 1)):
            raise ValueError(
                f"--min-ranks {fewest}: give a power of two that is no more than --ranks, a number then, too"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Number of ranks; 1 as long as it has not been chosen."""
        return 1 if self.ranks == "auto" else self.ranks

    @field_validator("group_runs", "shard", "speculate", mode="before")
    @classmethod
    def _on_or_off(cls, given: object) -> object:
        """YAML reads a bare ``on`` as true."""
        return {True: "on", False: "off"}[given] if isinstance(given, bool) else given


class ServerConfig(EngineSettings):
    """The settings of a server: those of its engine and its own."""

    address: str = setting("127.0.0.1:50051", "HOST:PORT; port 0 picks a free one.", subject=NETWORK)
    http: str = setting(
        "",
        "HOST:PORT for clients of Tinker and OpenAI (gradwire[http]); a PORT alone is on loopback; off when absent.",
        subject=NETWORK,
    )
    host_names: Several[str] = setting(
        (),
        "A further host name by which a server without keys is asked over HTTP, as behind a proxy; repeat.",
        subject=NETWORK,
    )
    engines: int | Literal["auto"] = setting(
        1,
        "Engines on this machine, each with the models and runs of its own; auto: one a GPU; 0: none, those of other"
        " machines (gradwire engine) do all.",
        subject=COMPUTE,
    )
    each_engine: tuple[EngineChoice, ...] = setting(
        (),
        "What one of several engines serves, as model=A,ranks=2 or model=B,device=cuda:3; repeat for each.",
        subject=COMPUTE,
    )
    engine_lease: float = setting(
        10.0,
        "Seconds without a word after which an engine on another machine (gradwire engine) ends, and is given up.",
        subject=NETWORK,
        ge=0.5,
        le=600,
    )
    insecure_bind: bool = setting(False, "Listen beyond loopback without keys.", subject=NETWORK)
    tls_cert: Path | None = setting(None, "PEM file with the certificate; speaks TLS.", subject=NETWORK)
    tls_key: Path | None = setting(None, "PEM file with its key.", subject=NETWORK)
    tls_client_ca: Path | None = setting(
        None, "PEM file; only clients whose certificate it signed may connect.", subject=NETWORK
    )
    limits: Limits = setting(Limits(), "NAME=VALUE of a limit (see `gradwire status`); repeat.", subject=NETWORK)
    tokenizer_memory_gib: float = setting(
        2.0,
        "GiB that each process for texts or batches may hold.",
        subject=COMPUTE,
        gt=0,
        allow_inf_nan=False,
    )
    durability: Literal["journal", "checkpoint"] = setting(
        "journal", "journal: replay after a crash. checkpoint: go back to the last one.", subject=DURABILITY
    )
    checkpoint_every_steps: int = setting(
        100, "Optimizer steps after which the server saves a run by itself; 0 for never.", subject=DURABILITY, ge=0
    )
    checkpoint_every_mib: float = setting(
        1024.0,
        "And MiB of submitted batches after which it does, whichever comes first; 0 for never.",
        subject=DURABILITY,
        ge=0,
        allow_inf_nan=False,
    )
    max_recovery_seconds: float = setting(
        60.0,
        "And seconds that a recovery would spend on repeating operations, as measured; 0 for never.",
        subject=DURABILITY,
        ge=0,
        allow_inf_nan=False,
    )
    job_workers: int = setting(
        1, "Jobs that run at a time, each in a process of its own; 0: jobs wait.", subject=COMPUTE, ge=0
    )
    job_scripts: bool = setting(
        False, "Administrators may run Python scripts as jobs, with the rights of this server.", subject=NETWORK
    )
    webhook: str = setting(
        "", "URL that is told of each job's end, signed with the secret in STATE/webhook.secret.", subject=NETWORK
    )
    keep_results_hours: float = setting(168.0, "Hours that a result waits to be fetched.", subject=DURABILITY, gt=0)
    price_per_hour: float = setting(
        0.0, "What an hour of one engine costs, for `gradwire usage`.", subject=OBSERVABILITY, ge=0, allow_inf_nan=False
    )
    accept_changes: bool = setting(
        False,
        "Runs go on although the base model's files, versions or settings are not what they were computed with.",
        subject=DURABILITY,
    )
    grace: float = setting(20.0, "Seconds that a shutdown waits for the operation that runs.", subject=DURABILITY, ge=0)
    heartbeat_timeout: float = setting(
        STALE_S,
        "Seconds of silence after which the engine is not ready (grpc.health.v1).",
        subject=OBSERVABILITY,
        gt=0,
    )
    metrics_address: str = setting(
        "", "HOST:PORT of Prometheus metrics; a PORT alone is on loopback; off when absent.", subject=OBSERVABILITY
    )
    metrics_runs: bool = setting(
        False, "Label the metrics of training with the run, for 100 runs at most.", subject=OBSERVABILITY
    )

    @model_validator(mode="before")
    @classmethod
    def _models_of_engines(cls, values: Any) -> Any:
        """Add the models of each engine to the server's."""
        if not isinstance(values, dict) or not isinstance(values.get("each_engine"), list | tuple):
            return values
        models = values.get("models", {})
        named = _named(models) if isinstance(models, str | list | tuple) else dict(models)
        choices: list[Any] = []
        for engine in values["each_engine"]:
            choice = parse_engine(engine) if isinstance(engine, str) else engine
            if isinstance(choice, dict):
                own = [{text: named[text]} if text in named else _named([text]) for text in choice.get("models", ())]
                named |= {name: path for each in own for name, path in each.items()}
                choice = choice | {"models": [name for each in own for name in each]}
            choices.append(choice)
        return values | {"models": named, "each_engine": choices}

    @field_validator("engines", mode="before")
    @classmethod
    def _number_or_auto(cls, given: object) -> object:
        return _number_or_auto(given, MAX_ENGINES, "engines", least=0)

    @field_validator("host_names")
    @classmethod
    def _names_alone(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not HOST_NAME.fullmatch(name):
                raise ValueError(f"give a host name alone, as gpu-box.example.org, not {name[:100]!r}")
        return names

    @field_validator("webhook")
    @classmethod
    def _a_url(cls, url: str) -> str:
        if url and not re.fullmatch(r"https?://[^\s/?#]+\S*", url):
            raise ValueError(f"give an address as https://example.org/hook, not {url[:100]!r}")
        return url

    @field_validator("address")
    @classmethod
    def _host_and_port(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"the address must be HOST:PORT, with a port up to 65535, not {address!r}")
        return address

    @field_validator("metrics_address", "http", mode="before")
    @classmethod
    def _on_loopback_unless_stated(cls, given: object) -> object:
        address = str(given) if type(given) is int else given  # YAML reads a port alone as a number
        if not isinstance(address, str) or not address:
            return address
        host, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise ValueError(f"the address must be HOST:PORT or PORT, not {address!r}")
        return f"{host or '127.0.0.1'}:{port}"

    @model_validator(mode="after")
    def _some_model(self) -> ServerConfig:
        if not self.models:
            raise ValueError("name at least one model: --model NAME_OR_FOLDER, or `models` in a file of settings")
        return self

    @model_validator(mode="after")
    def _engines_that_agree(self) -> ServerConfig:
        if self.each_engine and self.engines != 1:
            raise ValueError("--engine says what each engine serves, and so how many there are: leave out --engines")
        forms: dict[str, tuple[str | None, str | None]] = {}
        for engine in self.engine_settings:
            for name in engine.models:
                if forms.setdefault(name, (engine.dtype, engine.quantize)) != (engine.dtype, engine.quantize):
                    raise ValueError(f"the engines that serve {name} need one dtype and one quantization, as runs move")
        return self

    @model_validator(mode="after")
    def _whole_tls(self) -> ServerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return self

    @property
    def engine(self) -> EngineSettings:
        """The engine's part."""
        return EngineSettings.model_validate({name: getattr(self, name) for name in EngineSettings.model_fields})

    @property
    def engine_settings(self) -> list[EngineSettings]:
        """The settings of each engine; empty if all are alike."""
        ours = {name: getattr(self, name) for name in EngineSettings.model_fields}
        return [EngineSettings.model_validate(choice.settings(ours)) for choice in self.each_engine]

    @property
    def all_models(self) -> dict[str, str]:
        """The models that a client may name."""
        return self.allow_models | self.models

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the doors."""
        return all(map(_on_loopback, filter(None, (self.address, self.http))))


def model_named(paths: Mapping[str, str], name: str) -> str | None:
    """The name of the model with this name or path, of models whose paths are given by name; None if there is none."""
    if name in paths:
        return name
    folder = normpath(name)
    return next((known for known, path in paths.items() if normpath(path) == folder), None)


def _on_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _split(given: str | list[Any] | tuple[Any, ...]) -> list[Any]:
    """The entries of a list, or of a text that separates them with commas."""
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else list(given)


def _named(given: str | list[Any] | tuple[Any, ...]) -> dict[str, str]:
    """Name -> folder of models as :func:`parse_model` reads them."""
    named: dict[str, str] = {}
    for text in _split(given):
        name, path = parse_model(str(text))
        if named.setdefault(name, path) != path:
            raise ValueError(f"two models are named {name!r}: give one of them another name with NAME=FOLDER")
    return named


def parse_model(text: str) -> tuple[str, str]:
    """``NAME=PATH``, or a path (its last part names it), or a Hugging Face name as it is."""
    name, separator, path = text.partition("=")
    if separator:
        return name, path
    folder = Path(text).expanduser()
    return (folder.resolve().name, str(folder.resolve())) if folder.is_dir() else (text, text)

"""Reads, checks and shows the configuration of a run.

YAML and ``key=value`` overrides are merged by OmegaConf, then validated as a whole by pydantic. Every problem is
reported at once, with the full key, the given value and what was expected. Relative paths inside a file are relative
to the current directory, not to the file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from mrlhf.config_cache import cache_problems
from mrlhf.config_packing import packing_problems
from mrlhf.config_schema import PPOConfig
from mrlhf.config_sections import RunConfig, Section
from mrlhf.errors import ConfigError, join_problems
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes, size_problems, vocabulary_problems

__all__ = ["Option", "PPOConfig", "check_files", "check_run", "load_config", "option_table", "to_yaml"]

C = TypeVar("C", bound=RunConfig)


class Option(NamedTuple):
    """One key of the configuration, as shown by ``--help``."""

    name: str
    type: str
    default: str
    description: str


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    schema: type[C] = PPOConfig,  # type: ignore[assignment]
) -> C:
    """Read a YAML file (None: start empty), apply ``key=value`` overrides, validate, fill in the derived paths.

    Args:
        path: the file.
        overrides: in order; a later one wins.
        schema: the kind of run.

    Raises `ConfigError` naming the file and line of a syntax error, or every wrong key with its value.
    """
    merged = _read_yaml(Path(path)) if path is not None else OmegaConf.create({})
    for override in overrides:
        _apply_override(merged, override)
    try:
        unset = sorted(OmegaConf.missing_keys(merged))
        data = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{_origin(path)}: {key}{_first_line(error)}") from None
    if unset:
        raise ConfigError(f"{_origin(path)}: no value was given for {', '.join(unset)}, marked ??? as mandatory")
    return _validate(data, _origin(path), schema).with_derived_paths()


def to_yaml(config: RunConfig) -> str:
    """The configuration as YAML that `load_config` reads back unchanged."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def option_table(model: type[BaseModel] = PPOConfig) -> list[Option]:
    """Every key with type, default and description, in the order of the tree; elements of lists as ``name[].key``."""
    return list(_options(model, ""))


def check_files(config: RunConfig, sections: Sequence[str] = ()) -> None:
    """Raise one `ConfigError` naming every file and folder that is missing, of the given sections (none: of all)."""
    problems = [line for line in file_problems(config) if not sections or line.split(".")[0] in sections]
    if problems:
        raise ConfigError(join_problems("the configuration names files that cannot be used:", problems))


def check_run(
    config: PPOConfig, world_size: int, models: Mapping[str, ModelConfig], *, cache_element_bytes: int | None = None
) -> None:
    """Raise one `ConfigError` with everything about layout, batches, lengths and models that does not fit together.

    ``models`` maps roles (``actor``, ``critic``, ``reference``, ``reward``, ...) to architectures. Needs no process
    group, so that each launch is refused before any exists; ``cache_element_bytes`` as in `layout_problems`.
    """
    longest, each = config.longest_response, cache_element_bytes
    problems = layout_problems(config, world_size, models, max_response_length=longest, cache_element_bytes=each)
    if not config.ranks_of("actor", world_size):
        raise ConfigError(join_problems("these sizes cannot work together:", problems))
    if config.actor.moe_aux_loss_coef and "actor" in models and models["actor"].num_experts is None:
        problems.append(
            f"actor.moe_aux_loss_coef {config.actor.moe_aux_loss_coef} is for mixture-of-experts models, and the actor "
            "is dense; set it to 0"
        )
    limit = config.ptx.max_length
    problems += [
        f"ptx.max_length {limit} is over the {role}'s length of {model.max_position_embeddings}; lower it"
        for role, model in models.items()
        if role == "actor" and limit is not None and limit > model.max_position_embeddings
    ]
    if config.ptx.path is not None and config.ptx.batch_size is not None:
        ptx = size_problems(
            config.sizes_of("actor", world_size),
            {},
            minibatch_size=config.ptx.batch_size,
            micro_batch_size=config.ppo.micro_batch_size,
            micro_batch_tokens=config.ppo.micro_batch_tokens,
            batch_name="ptx.batch_size",
        )
        problems += [problem for problem in ptx if problem not in problems]
    if problems:
        raise ConfigError(join_problems("these sizes cannot work together:", problems))


def layout_problems(
    config: PPOConfig,
    world_size: int,
    models: Mapping[str, ModelConfig],
    *,
    max_response_length: int,
    training: bool = True,
    cache_element_bytes: int | None = None,
) -> list[str]:
    """`size_problems` of every layout of the run with the models that have it.

    Args:
        config: of the run.
        world_size: number of ranks.
        models: architectures by role.
        max_response_length: of the longest response.
        training: False leaves the sizes of batches out.
        cache_element_bytes: of a key or value in generation; None for those of the run's dtype.
    """
    places: dict[tuple[range, ParallelSizes], list[str]] = {}
    problems = vocabulary_problems(models) + packing_problems(config, models, training=training)
    if not config.ranks_of("actor", world_size):
        return [*problems, _no_actor_ranks(config, world_size)]
    for role in ("actor", *models):
        members = places.setdefault((config.ranks_of(role, world_size), config.sizes_of(role, world_size)), [])
        members += [role] if role in models and role not in members else []
    for number, ((ranks, sizes), members) in enumerate(places.items()):
        # The first layout shares out the prompts; minibatches are those of the models that are trained.
        batches: dict[str, Any] = {}
        if training and number == 0:
            batches |= {
                "prompts_per_iteration": config.rollout.prompts_per_iteration,
                "rows_per_iteration": config.rows_per_iteration,
            }
        if training and (number == 0 or "critic" in members):
            batches |= {
                "minibatch_size": config.ppo.minibatch_size,
                "micro_batch_size": config.ppo.micro_batch_size,
                "micro_batch_tokens": config.ppo.micro_batch_tokens,
            }
        found = size_problems(
            sizes,
            {role: models[role] for role in members},
            # Without a limit of its own a prompt takes what the response leaves, at least one token.
            max_prompt_length=config.data.max_prompt_length or 1,
            max_response_length=max_response_length,
            **batches,
        )
        whose = "" if number == 0 else f"layout of {', '.join(members)}: "
        if config.on_critic_ranks:
            count = len(config.critic_ranks_of(world_size))
            place = f"ranks {ranks.start} to {ranks.stop - 1} of {world_size}, critic_ranks {count}"
            whose = f"{', '.join(members)} ({place}; world sizes are of these ranks): "
        problems += [f"{whose}{problem}" for problem in found if problem not in problems]
    if not problems:
        each = cache_element_bytes or (4 if config.precision.dtype == "fp32" else 2)
        problems = cache_problems(config, world_size, models, max_response_length, element_bytes=each)
    return problems


def _no_actor_ranks(config: PPOConfig, world_size: int) -> str:
    count, needed = len(config.critic_ranks_of(10**9)), config.smallest_world
    given = "critic_ranks" if config.critic_ranks else "placement split: one replica of critic and reward models:"
    fewer = ", lower critic_ranks" if config.critic_ranks else ""
    return (
        f"{given} {count} of {world_size} ranks leave none for actor and reference; start {needed} ranks or "
        f"more{fewer}, or set placement=colocated"
    )


def file_problems(config: RunConfig) -> list[str]:
    """What is missing on disk, one line per key; empty when all is there."""
    problems = []
    for key, path in config.model_folders().items():
        if not Path(path).is_dir():
            problems.append(
                f"{key}: {path} is not a folder; expected a Hugging Face folder or one of `mrlhf convert import`"
            )
        elif not (Path(path) / "config.json").is_file():
            problems.append(
                f"{key}: {path} has no config.json; expected a Hugging Face folder or one of `mrlhf convert import`"
            )
    files = config.data_files().items()
    problems += [f"{key}: {path} is not a file" for key, path in files if path and not Path(path).is_file()]
    if not Path(config.tokenizer_path).exists():
        problems.append(f"tokenizer.path: {config.tokenizer_path} does not exist")
    return problems


def _origin(path: str | Path | None) -> str:
    return "the overrides" if path is None else str(path)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_yaml(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give the path of a YAML configuration") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give the path of a YAML configuration") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        begun = f" that begins in line {error.context_mark.line + 1}" if error.context_mark is not None else ""
        detail = f"{error.context}{begun}; {error.problem}" if error.context else f"{error.problem}"
        raise ConfigError(f"{where}: not valid YAML: {detail}") from None
    except (OSError, UnicodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {_first_line(error)}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of keys to values at the top, found a {_kind(loaded)}")
    return loaded


def _kind(value: object) -> str:
    return "list" if isinstance(value, ListConfig | list) else type(value).__name__


def _apply_override(config: DictConfig, override: str) -> None:
    key, equals, value = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected key=value, such as ppo.epochs=2")
    try:
        parsed = _parse_value(value) if value else None
        OmegaConf.update(config, key, parsed, merge=True, force_add=True)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {_first_line(error)}") from None
    except (OmegaConfBaseException, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"override {override!r}: {_first_line(error)}") from None


def _parse_value(text: str) -> Any:
    # Not resolved here: an interpolation refers to the merged configuration.
    holder = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    return holder["value"] if isinstance(holder, dict) else None


def _validate(data: Any, origin: str, schema: type[C]) -> C:
    try:
        # JSON input, since pydantic's strict mode takes lists for tuples there and nowhere else.
        return schema.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        problems = [line for details in error.errors() for line in _explain(details, schema)]
    raise ConfigError(join_problems(f"{origin}: the configuration is not valid:", problems))


def _explain(error: ErrorDetails, schema: type[RunConfig]) -> list[str]:
    key, parent = _locate(error["loc"], schema)
    if error["type"] == "extra_forbidden":
        return [f"{key}: unknown key{_suggestion(key, parent, schema)}"]
    if error["type"] == "missing":
        return _explain_missing(key, parent.model_fields.get(str(error["loc"][-1])) if parent else None)
    if error["type"] == "value_error":
        prefix = f"{key}: " if key else ""
        return [prefix + line for line in str(error["ctx"]["error"]).splitlines()]
    if error["type"] == "union_tag_invalid":
        return [f"{key}.kind: given {error['ctx']['tag']!r}, expected one of {error['ctx']['expected_tags']}"]
    if error["type"] == "union_tag_not_found":
        return [f"{key}: given {error['input']!r}, expected a mapping with kind: model, function or remote"]
    expected = error["msg"].replace("Input should be ", "", 1).replace("greater than or equal to", "at least")
    expected = expected.replace("less than or equal to", "at most").replace("an object", "a mapping of keys to values")
    return [f"{key or 'the configuration'}: given {error['input']!r}, expected {expected}"]


def _explain_missing(key: str, field: FieldInfo | None) -> list[str]:
    sections = _section_types(field.annotation) if field else ()
    if len(sections) == 1:
        inner = {f"{key}.{name}": inner for name, inner in sections[0].model_fields.items() if inner.is_required()}
        return [line for name, inner_field in inner.items() for line in _explain_missing(name, inner_field)]
    what = f" ({field.description})" if field and field.description else ""
    return [f"{key}: required, but not given{what}"]


def _locate(loc: tuple[int | str, ...], schema: type[RunConfig]) -> tuple[str, type[BaseModel] | None]:
    """The dotted key of an error's location, and the section its last part should be a field of."""
    section: type[BaseModel] | None = schema
    parent: type[BaseModel] | None = schema
    variants: tuple[type[Section], ...] = ()
    key = ""
    for part in loc:
        chosen = next((v for v in variants if v.model_fields["kind"].default == part), None)
        if chosen is not None and isinstance(part, str):
            section, variants = chosen, ()
            continue
        parent = section
        if isinstance(part, int):
            key += f"[{part}]"
            continue
        key += f".{part}" if key else part
        field = section.model_fields.get(part) if section else None
        models = _section_types(field.annotation) if field else ()
        section = models[0] if len(models) == 1 else None
        variants = models if len(models) > 1 else ()
    return key, parent


def _suggestion(key: str, parent: type[BaseModel] | None, schema: type[RunConfig]) -> str:
    prefix, _, leaf = key.rpartition(".")
    names = list(parent.model_fields) if parent else []
    near = difflib.get_close_matches(leaf, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {f'{prefix}.' if prefix else ''}{near[0]}?"
    every = [option.name for option in option_table(schema)]
    same = [name for name in every if name.rpartition(".")[2] == leaf]
    near = same or difflib.get_close_matches(key, every, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; the keys here are {', '.join(names)}" if names else ""


def _section_types(annotation: Any) -> tuple[type[Section], ...]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(found for part in get_args(annotation) for found in _section_types(part))


def _options(model: type[BaseModel], prefix: str) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        full = f"{prefix}{name}"
        sections = _section_types(field.annotation)
        if len(sections) == 1:
            if field.default is None:
                # Its keys are those of another section, which the description names.
                yield Option(full, "section or null", "null", field.description or "")
                continue
            yield from _options(sections[0], f"{full}.")
            continue
        yield Option(full, _type_name(field.annotation), _default_text(field), field.description or "")
        seen: set[str] = set()
        for section in sections:
            for option in _options(section, f"{full}[]."):
                if option.name.endswith("].kind"):
                    option = option._replace(type="|".join(s.model_fields["kind"].default for s in sections))
                    option = option._replace(default="required", description="what the source is")
                if option.name not in seen:
                    yield option
                seen.add(option.name)


def _type_name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(args[0])
    if origin is Literal:
        return "|".join(str(arg) for arg in args)
    if origin in (Union, UnionType):
        named = dict.fromkeys(_type_name(arg) for arg in args)
        return " or ".join(named)
    if origin is tuple:
        return f"list of {_type_name(args[0])}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "mapping"
    return getattr(annotation, "__name__", str(annotation))


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=False)
    if value is PydanticUndefined:
        return ""
    if value is None or isinstance(value, bool | tuple):
        return json.dumps(value)
    return str(value)

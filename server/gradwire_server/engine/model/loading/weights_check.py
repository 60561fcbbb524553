"""Comparison of a model's files of weights with its configuration, without reading the weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.loading.configuration import read_configuration, without_path
from gradwire_server.engine.model.vision.image_tokens import auto_class, takes_images

logger = logging.getLogger(__name__)

NAMED = 3
"""Tensors that a message names, of those that are at fault."""


class WeightsError(ValueError):
    """A model's weights cannot be loaded; the message says which file or tensor is at fault."""


def check_weights(path: str) -> None:
    """Read the headers of a model's files, and compare names and shapes with those that its configuration asks for.

    Args:
        path: Folder or hub name.

    Raises:
        WeightsError: A file is missing or cut short, or a tensor is missing or has another shape.
    """
    config = read_configuration(path)
    if getattr(config, "quantization_config", None) is not None:
        return  # its tensors are not those of the configuration; loading it says what is wrong
    try:
        with _silent(), preserved_rng():
            _, report = auto_class(takes_images(config)).from_pretrained(
                path,
                use_safetensors=True,
                trust_remote_code=False,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise WeightsError(f"a file of its weights is cut short or damaged ({error})") from error
    except OSError as error:
        reason = without_path(str(error).partition("\n")[0], path)
        raise WeightsError(reason.removeprefix("Error ").rstrip(".")) from error
    except Exception as error:  # whatever transformers cannot do without weights; loading them will tell
        logger.warning("the weights of %s are not checked before they are loaded: %s", path, error)
        return
    if mismatched := sorted(report["mismatched_keys"]):
        shapes = [f"{name} has the shape {list(was)}, not {list(wanted)}" for name, was, wanted in mismatched]
        raise WeightsError(f"its weights do not fit its config.json: {_some(shapes)}")
    if missing := sorted(report["missing_keys"]):
        raise WeightsError(f"its files lack weights that its config.json asks for: {_some(missing)}")


def _some(faults: Collection[str]) -> str:
    more = f" and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
    return ", ".join(list(faults)[:NAMED]) + more


@contextmanager
def _silent() -> Iterator[None]:
    """Hold back transformers' report, which the error takes the place of."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)

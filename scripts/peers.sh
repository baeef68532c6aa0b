#!/usr/bin/env bash
# Fetch published kernels to benchmark against, trimmed to what a Hopper GPU loads; never committed.
#
#     scripts/peers.sh [DIR] [vllm] [flashinfer] [sglang]      DIR: .peers
#
# Writes DIR/pack/core.tar.xz (11 MiB: FlashMLA, DeepGEMM, SGLang's Triton kernels, humming) and, if asked, DIR/pack/vllm.tar.xz
# (29 MiB: vLLM's top-k and Marlin libraries), DIR/pack/flashinfer.tar.xz (its top-k and mHC, which compile themselves) and
# DIR/pack/sglang.tar.xz (5 MiB: its library, for torch 2.11 with CUDA 13, and Triton kernels of experts).
# Where they are to run:
#
#     mkdir -p /tmp/peers && for f in DIR/pack/*.tar.xz; do tar -xJf $f -C /tmp/peers; done
#     PEERS=/tmp/peers python scripts/bench_kernels.py
#
# Code for other architectures is blanked inside the libraries (scripts/bench/fatbin.py); ARCH=89 keeps another one.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$(realpath -m "${1:-.peers}")
shift || true
python=${PYTHON:-python3}
wheels=$dir/wheels src=$dir/src out=$dir/out pack=$dir/pack arch=${ARCH:-90}
mkdir -p "$wheels" "$pack"
rm -rf "$src" "$out"
mkdir -p "$src" "$out/core"

fetch() {  # NAME==VERSION: the wheel for Linux x86-64 and Python 3.12
  local stem=${1%%==*}
  compgen -G "$wheels/${stem//-/_}-${1##*==}-*.whl" >/dev/null && return
  local platforms=(--platform any --platform linux_x86_64 --platform manylinux2014_x86_64)
  for glibc in 39 35 34 31 28 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  "$python" -m pip download -q --no-deps --only-binary=:all: -d "$wheels" --python-version 3.12 --implementation cp \
    --abi cp312 --abi abi3 --abi none "${platforms[@]}" "$1"
}
take() {  # WHEEL-STEM PATTERN…: unpack some files of a wheel
  local wheel; wheel=$(compgen -G "$wheels/$1-*.whl" | head -n 1); shift
  unzip -q -o "$wheel" "$@" -d "$src"
}
trim() { "$python" -m scripts.bench.fatbin "$1" "$2" "$arch"; }
squeeze() {  # NAME: pack what was put together under that name
  tar -C "$out/$1" -c . | xz -T2 -6 > "$pack/$1.tar.xz"
  echo "$pack/$1.tar.xz $(stat -c %s "$pack/$1.tar.xz") bytes"
}

# FlashMLA: use_legacy=True reaches the Hopper kernels; the current ones are for Blackwell, and are only needed to import it
fetch sgl-flash-mla==1.0.0
take sgl_flash_mla 'flash_mla/*'
mv "$src/flash_mla" "$out/core/"
for f in "$out"/core/flash_mla/*.so; do trim "$f" "$f"; done

# DeepGEMM, as vLLM ships it: it compiles with nvcc at first use
fetch vllm==0.33.0
take vllm 'vllm/third_party/deep_gemm/*'
mv "$src/vllm/third_party/deep_gemm" "$out/core/"

# SGLang: kernel files alone; probes/kernel_audit/adapters/absent.py stands in for the server that they import
fetch sglang==0.5.23
ops=sglang/kernels/ops
files=("$ops/attention/dsv4/fp4_indexer.py" "$ops/attention/dsv4/triton_sparse_decode/*.py"
       "$ops/attention/dsv4/unified_kv_kernels/paged_decode.py" "$ops/attention/dsv4/unified_kv_kernels/paged_prefill.py"
       "$ops/quantization/fp4_fake_quant.py" "$ops/quantization/fp4_indexer_quant.py"
       "$ops/layernorm/mhc.py" "$ops/layernorm/mhc_post_split_h.py")
take sglang "${files[@]}"
mv "$src/sglang" "$out/core/"

fetch humming-kernels==0.1.19
take humming_kernels 'humming/*'
mv "$src/humming" "$out/core/"
squeeze core

for extra in "$@"; do
  mkdir -p "$out/$extra"
  case $extra in
    vllm)
      take vllm 'vllm/_C_stable_libtorch.abi3.so' 'vllm/_moe_C_stable_libtorch.abi3.so'
      for f in _C_stable_libtorch _moe_C_stable_libtorch; do trim "$src/vllm/$f.abi3.so" "$out/vllm/$f.abi3.so"; done ;;
    flashinfer)
      fetch flashinfer-python==0.7.2.post1
      fetch apache-tvm-ffi==0.1.12
      data=flashinfer/data
      take flashinfer_python 'flashinfer/*.py' "$data/include/*" "$data/cccl/*" "$data/spdlog/*" "$data/csrc/*topk*" \
        "$data/csrc/mhc/*" "$data/csrc/tvm_ffi_utils.h" -x 'flashinfer/experimental/*' 'flashinfer/moe_ep/*'
      take apache_tvm_ffi 'tvm_ffi/*'
      mv "$src/flashinfer" "$src/tvm_ffi" "$out/flashinfer/" ;;
    sglang)
      fetch sglang-kernel==0.4.3
      take sglang_kernel 'sgl_kernel/sm90/common_ops.abi3.so'
      take sglang "$ops/moe/ep_moe_kernels.py"
      trim "$src/sgl_kernel/sm90/common_ops.abi3.so" "$out/sglang/common_ops.abi3.so"
      mv "$src/sglang" "$out/sglang/"
      numa=$(ldconfig -p | awk '/libnuma\.so\.1 .*x86-64/ { print $NF; exit }')
      [ -z "$numa" ] || cp -L "$numa" "$out/sglang/" ;;  # the library needs it, and not every machine has it
    *) echo "unknown peer $extra; expected vllm, flashinfer or sglang" >&2; exit 2 ;;
  esac
  squeeze "$extra"
done

#!/bin/sh
# Build the cpu image, run it and ask it; lint them all, and build what the others add on stand-ins for their bases.
# Needs buildah (no daemon, no registry if BASE is at hand) and hadolint. build.sh cpu, stand-ins, or all (the default).
#
#   BASE         a Debian with python3 and its venv; unset is what cpu.Dockerfile names
#   PYTORCH      where torch without CUDA lies: a page of links, or a folder that BUILD_FLAGS mounts
#   BUILD_FLAGS  further flags of buildah build, such as --volume
#   VERSION      tag of what is built; unset is what the manifests name, components/version/version.env
#   STORE        folder of images; with what was built at the end
set -eu
cd "$(dirname "$0")/../.."
store=${STORE:-build/images}
version=${VERSION:-$(sed -n s/^VERSION=//p deploy/kubernetes/components/version/version.env)}
mkdir -p "$store"
export BUILDAH_ISOLATION=chroot # no user namespaces, no daemon
buildah() { command buildah --root "$PWD/$store/root" --runroot "$PWD/$store/run" "$@"; }
build() { # NAME BASE FLAGS...
    name=$1 base=$2
    shift 2
    # shellcheck disable=SC2086  # several words
    buildah build --network host --format docker ${BUILD_FLAGS:-} ${base:+--build-arg BASE=$base} "$@" \
        --file "deploy/images/${name%%-*}.Dockerfile" --tag "specdec-$name:$version" .
}
report() { buildah images --format '{{.Name}}:{{.Tag}} {{.Size}}' | grep "specdec-.*$1:$version"; }

build_cpu() {
    build cpu "${BASE:-}" ${PYTORCH:+--build-arg PYTORCH=$PYTORCH}
    report cpu
    container=$(buildah from --pull-never "specdec-cpu:$version")
    buildah run --network host "$container" -- python3 - < deploy/images/smoke.py
    buildah run --network host "$container" -- sh -c 'test "$(id -u)" = 1000 && ! command -v cc gcc g++ > /dev/null'
    echo "runs as user 1000, without a compiler"
    buildah rm "$container" > /dev/null
}
# cuda, neuron and vllm without packages: their own steps, not their bases, which are gigabytes from elsewhere.
build_stand_ins() {
    build cuda-stand-in "${BASE:-}" --build-arg LOCK=deploy/images/stand-in.lock
    for name in neuron vllm; do
        build $name-stand-in "${BASE:-$(sed -n s/^ARG\ BASE=//p deploy/images/cpu.Dockerfile)}" --build-arg INSTALL=true
    done
    report stand-in
}

hadolint deploy/images/*.Dockerfile
case "${1:-all}" in
    cpu) build_cpu ;;
    stand-ins) build_stand_ins ;;
    all) build_cpu && build_stand_ins ;;
    *) echo "build.sh cpu, stand-ins or all, not $1" >&2 && exit 2 ;;
esac

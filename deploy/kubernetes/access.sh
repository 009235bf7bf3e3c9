#!/bin/sh
# Secret access of an overlay's namespace: tokens for its draft workers, gateways and Prometheus, made here and kept
# nowhere else; targets get their hashes. Run it again for new ones, then restart what uses them.
#
#   deploy/kubernetes/access.sh cpu-demo
set -eu
here=$(dirname "$0")
namespace=$here/overlays/$1/namespace.yaml
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for who in "worker --grant worker" "gateway --grant client --speaks_for_others" "ops --grant ops"; do
    # shellcheck disable=SC2086 # a name and its flags
    "${PYTHON:-python3}" "$here/../../main.py" --role token --auth_file "$folder/auth.toml" \
        --name $who > "$folder/${who%% *}"
done
kubectl apply --filename "$namespace"
kubectl create secret generic access --namespace "specdec-$1" --from-file "$folder" --dry-run=client --output yaml |
    kubectl apply --filename -

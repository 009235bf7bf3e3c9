#!/bin/sh
# Secret access of namespaces: tokens for draft workers, gateways, Prometheus and clients, made here and kept nowhere else;
# servers get their hashes. Overlays that one client or benchmark uses are named together, and get the same ones.
# ACCOUNTS names further clients, each with a token. Run it again for new tokens, then restart what uses them.
#
#   ACCOUNTS="alice bob" deploy/kubernetes/access.sh trn2-baseline trn2-fused benchmark
#   kubectl -n specdec-trn2-fused get secret access -o jsonpath='{.data.alice}' | base64 --decode
set -eu
here=$(dirname "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
make() { # NAME FLAGS...
    "${PYTHON:-python3}" "$here/../../main.py" --role token --auth_file "$folder/auth.toml" --name "$@" > "$folder/$1"
}
make worker --grant worker
make gateway --grant client --speaks_for_others
make ops --grant ops
for account in client ${ACCOUNTS:-}; do make "$account" --grant client; done
for name in "$@"; do
    namespace=$here/overlays/$name/namespace.yaml
    [ -e "$namespace" ] || namespace=$here/$name/namespace.yaml
    kubectl apply --filename "$namespace"
    kubectl create secret generic access --namespace "specdec-$name" --from-file "$folder" --dry-run=client --output yaml |
        kubectl apply --filename -
done

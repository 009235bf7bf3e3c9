#!/bin/sh
# Copy the checkpoints of $MODEL_IDS to DIR/NAME. The bucket behind DIR takes whole new files only, no renames and no
# overwrites: so they are downloaded elsewhere, and config.json goes last, as the sign that all are there.
set -eu
into=$1
scratch=${SCRATCH:-/cache}
for id in $MODEL_IDS; do
    to=$into/${id##*/} from=$scratch/${id##*/}
    if [ -e "$to/config.json" ]; then
        echo "$to is there"
        continue
    fi
    hf download "$id" --local-dir "$from"
    rm -rf "$from/.cache"
    (cd "$from" && find . -type f ! -path ./config.json -print && echo ./config.json) | while read -r file; do
        if [ "$(stat -c %s "$to/$file" 2>/dev/null)" != "$(stat -c %s "$from/$file")" ]; then
            mkdir -p "$(dirname "$to/$file")"
            cp "$from/$file" "$to/$file"
        fi
    done
    rm -rf "$from"
    echo "$to is whole"
done

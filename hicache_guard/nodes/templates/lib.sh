# Sourced by run.sh and job.sbatch: starts processes, waits for them, ends all of them.
# shellcheck shell=bash
#
# The exit status is that of the first process that ended before it should, and 1 where that was 0.
# Each process is a group of its own. How each ended is written to $RUN/ended, in that order.

set -m # a process group for each
PATIENCE=${PATIENCE:-3600}
GRACE=${GRACE:-30}
groups=()

say() { printf 'hicache-guard: %s\n' "$*" >&2; }

# NAME COMMAND...: in the background, its output in the log folder.
begin() {
    local name=$1
    shift
    say "starting $name"
    (
        set +e
        "$@"
        printf '%s %s\n' "$?" "$name" >>"$RUN/ended"
    ) </dev/null >"$RUN/log/$name.log" 2>&1 &
    groups+=("$!")
}

# Leaves with the status of the first that ended, if any has.
nothing_ended() {
    local status name
    [[ -s $RUN/ended ]] || return 0
    read -r status name <"$RUN/ended"
    say "$name ended with status $status; see $RUN/log/$name.log"
    exit "$((status == 0 ? 1 : status))"
}

# NAME URL: until it answers.
answers() {
    local limit=$((SECONDS + PATIENCE))
    until curl --silent --fail --max-time 5 --output /dev/null "$2"; do
        nothing_ended
        if ((SECONDS >= limit)); then
            say "$1 did not answer at $2 within $PATIENCE s; see $RUN/log/$1.log"
            exit 1
        fi
        sleep 0.5
    done
    say "$1 answers"
}

# NAME...: until each has ended well; the first that has not is the end.
all_done() {
    local name status ended
    for name in "$@"; do
        while :; do
            while read -r status ended; do
                if [[ $status != 0 ]]; then
                    say "$ended failed with status $status; see $RUN/log/$ended.log"
                    exit "$status"
                fi
                [[ $ended == "$name" ]] && break 2
            done <"$RUN/ended"
            sleep 0.2
        done
    done
    : >"$RUN/ended"
    groups=()
}

# Ends every group: asked first, killed after $GRACE seconds.
tear_down() {
    local status=$? group limit
    set +e # nothing keeps this from its end
    trap '' INT TERM HUP
    trap - EXIT
    for group in "${groups[@]}"; do kill -TERM -- "-$group" 2>/dev/null; done
    limit=$((SECONDS + GRACE))
    for group in "${groups[@]}"; do
        while kill -0 -- "-$group" 2>/dev/null && ((SECONDS < limit)); do sleep 0.2; done
        kill -KILL -- "-$group" 2>/dev/null
    done
    say "all is ended; traces and logs are in $RUN"
    exit "$status"
}

trap tear_down EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

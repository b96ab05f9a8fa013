# Sourced by the launch scripts: waits for process $job to its end, although signals end `wait`
# early, and leaves its exit code in $code.  A trap sets $interrupted.
wait_for_job() {
  local result
  while :; do
    interrupted=''
    wait "$job"
    result=$?
    [ "$result" -ne 127 ] || [ -z "${code:-}" ] || break # already waited for
    code=$result
    # Above 128 after a signal: `wait` ended, not the job.
    if [ -z "$interrupted" ] || [ "$code" -le 128 ]; then break; fi
  done
}

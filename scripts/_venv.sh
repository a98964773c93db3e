# Sourced by the scripts beside it: makes .venv at the repository's root, or brings it up to date, and says what it does.
# Invariant: the stamp names an installation only once it has run to its end. While one runs it says "installing", so that
# a broken .venv is never taken for a good one: the next start begins again from nothing.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
STAMP="$VENV/patchgrid-stamp"

say() { printf 'patchgrid: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

# The repository's path is part of it: a clone that has moved has an editable install that points to nowhere.
fingerprint() { { printf '%s\n' "$ROOT" && cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt"; } | sha256sum | cut -d ' ' -f 1; }

# ensure_venv REQUIREMENT: "." to run the service, ".[dev]" to test and check it (which serves as well).
# PYTHON names the interpreter that a new .venv is made with. A subshell: the lock goes when it ends.
ensure_venv() (
    requirement="$1"
    cd "$ROOT"
    exec 9<pyproject.toml
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        say "waiting for another installation into .venv"
        flock 9
    fi

    wanted="$(fingerprint)"
    state="$(cat "$STAMP" 2>/dev/null || true)"
    runs() { "$VENV/bin/python" "$@" >/dev/null 2>&1; }
    case "$state" in
        "$wanted $requirement" | "$wanted .[dev]") if runs -c ''; then return; fi ;;
        "") if [[ -e "$VENV/pyvenv.cfg" ]]; then runs -m pip --version || fail ".venv has no working pip; remove it"; fi ;;
    esac

    python="${PYTHON:-python3}"
    if [[ ! -e "$VENV/pyvenv.cfg" || "$state" == installing ]] || ! runs -c ''; then
        "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
            fail "$python is not Python 3.11 or later with venv (on Debian: apt-get install python3-venv); PYTHON names another"
        say "making .venv with $("$python" --version)"
        mkdir -p "$VENV"
        echo installing >"$STAMP"
        find "$VENV" -mindepth 1 -maxdepth 1 ! -name "${STAMP##*/}" -exec rm -rf {} +
        "$python" -m venv "$VENV"
    fi

    echo installing >"$STAMP"
    say "installing $requirement into .venv (minutes the first time: torch is large)"
    pip_install() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet install -c constraints.txt "$@"; }
    pip_install setuptools # the one that constraints.txt names builds the package, not the newest of the day
    pip_install --no-build-isolation -e "$requirement"
    echo "$wanted $requirement" >"$STAMP"
    say "installed"
)

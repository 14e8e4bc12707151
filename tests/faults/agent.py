"""An agent as a program, which ends badly for some replies: `python agent.py BAD FOLDER OF`."""

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from zlib import crc32


def ask(messages):
    """Text of the reply to some messages."""
    address = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(address, json.dumps({"messages": messages}).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.loads(reply.read())["choices"][0]["message"]["content"]


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_the_run(folder):
    """Kill the run, whose child is the launcher, whose child is the worker of this program."""
    try:
        Path(folder, "struck").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(parent_of(parent_of(os.getppid())), signal.SIGKILL)
    time.sleep(3600)


def main(bad, folder, of):
    messages = [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]
    first = ask(messages)
    if crc32(f"{messages} {first}".encode()) % int(of) == 0:
        if bad == "hangs":
            time.sleep(3600)
        if bad == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if bad == "kills_the_run":
            kill_the_run(folder)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": " more "}]
    second = ask(messages)
    helper = ask([{"role": "user", "content": "help"}])
    print(json.dumps({"reward": len(first + second + helper) / 24, "completion": second}))


if __name__ == "__main__":
    main(*sys.argv[1:])

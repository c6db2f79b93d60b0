#!/usr/bin/env python3
"""A stand-in for nvidia-smi: `-q -x`, with `-i`, and `-L`, of the GPUs in a JSON file.

Its XML has the elements of nvsmi_device_v12.dtd that are read of it, in the forms that drivers
550 and 575 have printed.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

ACTIONS = ("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset")
CLOCKS = {"sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80}


def tag(name, content):
    return f"<{name}>{content}</{name}>"


def process(one, gi="N/A"):
    ids = tag("gpu_instance_id", gi) + tag("compute_instance_id", "0" if gi != "N/A" else "N/A")
    named = tag("pid", one["pid"]) + tag("type", one.get("type", "C"))
    return tag("process_info", ids + named + tag("process_name", one["name"]))


def mig_device(number, part, uuids):
    content = tag("index", number) + tag("gpu_instance_id", part["gi"])
    content += tag("compute_instance_id", 0)
    content += tag("uuid", part["uuid"]) if uuids else ""
    return tag("mig_device", content + tag("fb_memory_usage", tag("total", f"{part['mib']} MiB")))


def yes(flag):
    return "Yes" if flag else "No"


def health(gpu):
    text = tag("gpu_recovery_action", ACTIONS[gpu["recovery"]] if "recovery" in gpu else "N/A")
    if "ecc" in gpu:
        volatile = tag("sram_uncorrectable_parity", 0) + tag("dram_uncorrectable", gpu["ecc"][0])
        lifetime = tag("sram_uncorrectable", 0) + tag("dram_uncorrectable", gpu["ecc"][1])
        lifetime += tag("sram_threshold_exceeded", yes(gpu.get("sram_threshold")))
        text += tag("ecc_errors", tag("volatile", volatile) + tag("aggregate", lifetime))
    if "ecc_old" in gpu:
        volatile, lifetime = (tag("double_bit", tag("total", n)) for n in gpu["ecc_old"])
        text += tag("ecc_errors", tag("volatile", volatile) + tag("aggregate", lifetime))
    if "rows" in gpu:
        names = ("corr", "unc", "pending", "failure")
        values = [gpu["rows"][0], gpu["rows"][1], yes(gpu["rows"][2]), yes(gpu["rows"][3])]
        rows = "".join(tag("remapped_row_" + n, v) for n, v in zip(names, values))
        text += tag("remapped_rows", rows)
    else:
        text += tag("remapped_rows", "N/A")
    if "retired" in gpu:
        counts = zip(("multiple_single_bit_retirement", "double_bit_retirement"), gpu["retired"])
        pages = "".join(tag(name, tag("retired_count", count)) for name, count in counts)
        text += tag(
            "retired_pages", pages + tag("pending_retirement", yes(gpu["retirement_pending"]))
        )
    word = gpu.get("clocks_word", "event")
    reasons = "".join(
        tag(f"clocks_{word}_reason_{name}", "Active" if gpu["clocks"] & bit else "Not Active")
        for name, bit in CLOCKS.items()
    )
    return text + tag(f"clocks_{word}_reasons", reasons)


def one_gpu(gpu, mig_uuids):
    mig = gpu.get("mig")
    text = tag("product_name", gpu["name"]) + tag("uuid", gpu["uuid"])
    text += tag("mig_mode", tag("current_mig", "N/A" if mig is None else "Enabled"))
    parts = "".join(mig_device(n, part, mig_uuids) for n, part in enumerate(mig or []))
    text += tag("mig_devices", parts or "\n\t\tNone\n")
    if gpu.get("error"):
        text += tag(
            "performance_state", "GPU is lost" if gpu["error"] == 15 else "GPU requires reset"
        )
    else:
        text += tag("performance_state", "P0") + health(gpu)
    text += tag("fb_memory_usage", tag("total", f"{gpu['mib']} MiB"))
    listed = "".join(process(one) for one in gpu.get("processes", []))
    listed += "".join(process(one, p["gi"]) for p in mig or [] for one in p["processes"])
    return f'<gpu id="{gpu["bus"]}">{text}{tag("processes", listed)}</gpu>'


def main(arguments):
    node = json.loads(pathlib.Path(os.environ["STANDIN_GPUS"]).read_text())
    if node.get("hangs"):
        # Out of reach of a kill of the group, with our stdout: as one that the kernel does not
        # let die.
        sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
        pathlib.Path(os.environ["STANDIN_GPUS"] + ".hung").write_text(str(sleeper.pid))
        time.sleep(600)
    if node.get("smi_fails"):
        sys.exit(node["smi_fails"])
    if node.get("smi_garbage"):
        print(node["smi_garbage"])
        return
    gpus = node["gpus"]
    if "-i" in arguments:
        bus = arguments[arguments.index("-i") + 1]
        gpus = [gpu for gpu in gpus if gpu["bus"] == bus]
    lost = [gpu for gpu in gpus if gpu.get("handle_error", 4) != 4]
    gpus = [gpu for gpu in gpus if "handle_error" not in gpu]
    for gpu in lost:
        short = gpu["bus"][4:]
        which = f"1: {short}" if node.get("new_words") else short
        print(f"Unable to determine the device handle for GPU{which}: Unknown Error")
    if lost and not node.get("new_words"):
        sys.exit(255)
    if "-L" in arguments:
        for index, gpu in enumerate(gpus):
            print(f"GPU {index}: {gpu['name']} (UUID: {gpu['uuid']})")
            for n, part in enumerate(gpu.get("mig") or []):
                print(f"  MIG {part['profile']:<11} Device  {n}: (UUID: {part['uuid']})")
        return
    assert "-q" in arguments and "-x" in arguments, arguments
    blocks = "".join(one_gpu(gpu, node.get("mig_uuids", True)) for gpu in gpus)
    print('<?xml version="1.0" ?>')
    print('<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">')
    print(tag("nvidia_smi_log", tag("driver_version", node["driver"]) + blocks))


if __name__ == "__main__":
    main(sys.argv[1:])

"""The host processor."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from app.settings import DeviceSettings

# Flags of /proc/cpuinfo that name no instructions: what kernel, hypervisor and firmware say about clocks, interrupts,
# counters, virtualisation and mitigations. A flag that is not known here counts.
_NO_INSTRUCTIONS = """
    acc_power acpi amd_lbr_v2 amd_ppin aperfmperf apic arat arch_capabilities arch_lbr arch_perfmon art avic bts
    bus_lock_detect cat_l2 cat_l3 cdp_l2 cdp_l3 cmp_legacy constant_tsc cpb cppc cpuid cqm cqm_llc cqm_mbm_local
    cqm_mbm_total cqm_occup_llc cr8_legacy debug_swap decodeassists ds_cpl dtes64 dtherm dts epb ept ept_ad est
    extapic extd_apicid flexpriority flush_l1d flushbyasid ht hw_pstate hwp hwp_act_window hwp_epp hwp_notify
    hwp_pkg_req hypervisor ibpb ibpb_exit_to_user ibrs ibrs_enhanced ibs ibt ida intel_ppin intel_pt invpcid_single
    irperf la57 lbrv mba mca mce md_clear mp msr mtrr nodeid_msr nonstop_tsc nonstop_tsc_s3 nopl npt nrip_save osvw
    overflow_recov pae pat pausefilter pbe pcid pconfig pdcm pebs perfctr_core perfctr_llc perfctr_nb perfmon_v2
    pfthreshold pge pku pln ospke pse pse36 pti pts rdt_a rep_good ring3mwait rsb_ctxsw sdbg sev sev_es
    sev_snp skinit sme smap smca smep spec_ctrl split_lock_detect ss ssbd ssbs stibp stibp_always_on succor svm svm_lock
    tm tm2 topoext tpr_shadow tsc tsc_adjust tsc_deadline_timer tsc_known_freq tsc_scale umip user_shstk
    v_spec_ctrl v_vmsave_vmload vgif vmcb_clean vme vmmcall vmx vnmi vpid wdt x2apic x2avic xsaveerptr xtopology xtpr
"""


class Cpu:
    """Threads and instruction set of the processor this process may use."""

    plugin = True
    kind = "cpu"

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._rows = _cpuinfo()

    @classmethod
    def acquire(cls, settings: DeviceSettings) -> Self:
        """Set the number of threads, on this thread, for every operator that follows."""
        threads = settings.threads or available_processors()
        torch.set_num_threads(threads)
        return cls(threads)

    @property
    def name(self) -> str:
        """The processor's model name."""
        return self._rows.get("model name") or platform.machine()

    @property
    def threads(self) -> int:
        """Threads of one operator."""
        return self._threads

    def fingerprint(self) -> Mapping[str, Any]:
        """Architecture, instruction set and threads: generated code holds the vector width as a number.

        The model's name is not in it: processors with the same instructions share their code.
        """
        flags = self._rows.get("flags") or self._rows.get("Features") or ""
        return {
            "kind": self.kind,
            "architecture": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "features": " ".join(sorted({*flags.split()} - {*_NO_INSTRUCTIONS.split()})),
            "threads": self._threads,
        }


def available_processors() -> int:
    """Return the processors that the affinity mask and the cgroup's quota leave to this process, at least one."""
    allowed = len(os.sched_getaffinity(0))
    quota = _quota()
    return max(1, min(allowed, round(quota))) if quota else allowed


def _quota() -> float | None:
    """Return the cgroup's processors: `cpu.max` (version 2) or the CFS quota and period (version 1)."""
    root = Path("/sys/fs/cgroup")
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return int(quota) / int(period) if quota not in {"max", "-1"} else None


def _cpuinfo() -> dict[str, str]:
    """Return the rows of the first processor."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}

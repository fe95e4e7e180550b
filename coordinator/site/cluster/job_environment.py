"""Variables of the coordinator that reach Slurm's commands and jobs. Pure. Called by all clusters.

Rule: a job gets the variables that PASSED or `[cluster] export` names. A variable whose name suggests a secret is passed only
if `export` has its full name, or the job names it, as a judging job does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from evaljobs.secret_values import names_variable

INDEX_VARIABLE = "EVALSPAN_INDEX"
# Variables of an enclosing Slurm job, or of the user's listings, that must not reach Slurm commands.
FOREIGN_PREFIXES = ("SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_")
FOREIGN_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "GPU_DEVICE_ORDINAL",
        INDEX_VARIABLE,
    }
)
KEPT_NAMES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})

PASSED_VARIABLES: Mapping[str, str] = {
    "who and where": "HOME USER LOGNAME SHELL PWD OLDPWD TZ TERM TMPDIR TMP TEMP SCRATCH WORK PROJECT XDG_* KRB5CCNAME",
    "language": "LANG LANGUAGE LC_*",
    "where programs and libraries are": "PATH *_PATH *PATH *_HOME *_ROOT *_DIR *_BASE *_PREFIX LD_* CC CXX CFLAGS CXXFLAGS LDFLAGS",
    "modules": "MODULE* LMOD_* __LMOD_* _LMFILES_* LOADEDMODULES LOADEDMODULES_* _ModuleTable* __Init_Default_Modules "
    "BASH_ENV ENV BASH_FUNC_* EB* SPACK_* CRAY* PE_* NVHPC* MKLROOT",
    "Python": "PYTHON* VIRTUAL_ENV CONDA_* MAMBA_* UV_*",
    "libraries of evaluations": "HF_* HUGGINGFACE_* HUGGING_FACE_* TRANSFORMERS_* TOKENIZERS_* DATASETS_* SAFETENSORS_* "
    "ACCELERATE_* NLTK_DATA LMEVAL_* DISABLE_MULTIPROC",
    "torch and engines": "TORCH* PYTORCH_* TRITON_* VLLM_* SGLANG_* SGL_* FLASHINFER_* RAY_* NUMBA_* XLA_*",
    "GPUs": "CUDA* CUBLAS* CUDNN* NVIDIA_* NVTE_* NVSHMEM_* NCCL_* ROC* HIP_* HSA_* AMD_* MIOPEN_* RCCL_* "
    "ZE_* ZES_* SYCL_* UR_* ONEAPI_* ONEDNN_* CCL_* HABANA_* HL_*",
    "threads and memory": "OMP_* GOMP_* KMP_* MKL_* OPENBLAS_* BLIS_* MALLOC_* GLIBC_TUNABLES",
    "networks": "UCX_* UCC_* FI_* IB_* OMPI_* PMIX_* MPICH_* I_MPI_* GLOO_*",
    "proxies and certificates": "http_proxy https_proxy ftp_proxy all_proxy no_proxy "
    "HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY SSL_CERT_* REQUESTS_CA_BUNDLE CURL_CA_BUNDLE",
    "containers": "APPTAINER* SINGULARITY* ENROOT_* PYXIS_*",
    "Slurm and evalspan": "SBATCH_* EVALSPAN_*",
}
"""Purpose of variables -> names passed to jobs; `*` stands for any characters."""
_PATTERNS = tuple(pattern for row in PASSED_VARIABLES.values() for pattern in row.split())


def client_environment(inherited: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Slurm command, without FOREIGN names. `own`: `SlurmOptions.env`."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name in KEPT_NAMES or not (name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES)
    }
    return {**kept, "LC_ALL": "C.UTF-8", **own, "SLURM_TIME_FORMAT": "%s"}


def submission_environment(
    inherited: Mapping[str, str],
    own: Mapping[str, str],
    *,
    export: Sequence[str],
    secrets: Collection[str],
    given: Collection[str],
) -> dict[str, str]:
    """Return the environment of `sbatch`, which the job inherits. Arguments as in `client_environment` and `variables_passed_on`."""
    here = client_environment(inherited, own)
    kept = {name: value for name, value in here.items() if name in KEPT_NAMES or name in own}
    kept["SLURM_TIME_FORMAT"] = here["SLURM_TIME_FORMAT"]
    return variables_passed_on(here, export=export, secrets=secrets, given=given) | kept


def variables_passed_on(
    inherited: Mapping[str, str],
    *,
    export: Sequence[str] = (),
    secrets: Collection[str] = (),
    given: Collection[str] = (),
) -> dict[str, str]:
    """Return the variables passed to a job.

    `export`: additional names and patterns. `secrets`: names of secrets that do not look like one. `given`: secrets of this
    job.
    """

    def passes(name: str) -> bool:
        if name in secrets:
            return name in given
        if name in given or name in export:
            return True
        wanted = any(fnmatchcase(name, pattern) for pattern in (*_PATTERNS, *export))
        return wanted and not names_variable(name)

    return {name: value for name, value in inherited.items() if passes(name)}

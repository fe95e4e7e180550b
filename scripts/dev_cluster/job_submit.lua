-- gpu_jobs_only: the gpu partitions take no job without a GPU. demand_account: no job without an account is taken.
local function asks_gpu(job)
  for _, field in ipairs({"tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"}) do
    local value = job[field]
    if value ~= nil and string.find(value, "gpu", 1, true) then return true end
  end
  return false
end

function slurm_job_submit(job, partitions, uid)
  if demand_account and (job.account or "") == "" then
    slurm.log_user("name your account: --account=ACCOUNT")
    return slurm.ERROR
  end
  if not gpu_jobs_only then return slurm.SUCCESS end
  local wanted = job.partition or "gpu"
  for partition in string.gmatch(wanted, "[^,]+") do
    if (partition == "gpu" or partition == "spare") and not asks_gpu(job) then
      slurm.log_user("partition %s takes only jobs that ask for a GPU (--gpus, --gres=gpu:N)", partition)
      return slurm.ERROR
    end
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

// Linear layers of int8 and int4 weights, by VNNI.
#include "linear_integer_kernel.h"
#include "linear_task.h"

namespace legato::vnni {

void run_linear_task(const Task& task) { run_linear_task(task, integer_method(*task.linear)); }

}  // namespace legato::vnni

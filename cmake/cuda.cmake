# jax_tt/_cuda, the CUDA module. nvcc is called by custom commands, not through CMake's CUDA language, which wants a
# toolkit in one place, laid out as it expects: compiler wheels are neither, and architectures newer than the
# installed CMake would be refused.

# Sets `nvcc` to a compiler that works with the host compiler, or `reason` to why there is none.
function(jax_tt_find_nvcc)
  # Wheels of the compiler: nvidia/cu13/bin since CUDA 13, where cudart lies beside it.
  jax_tt_ask_python(wheels "import importlib.util as u; s = u.find_spec('nvidia'); print(';'.join(s.submodule_search_locations) if s else '')")
  set(hints "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin)
  foreach(wheel IN LISTS wheels)
    list(APPEND hints "${wheel}/cu13/bin" "${wheel}/cuda_nvcc/bin")
  endforeach()
  find_program(JAX_TT_NVCC nvcc PATHS ${hints} DOC "CUDA compiler")
  if(NOT JAX_TT_NVCC)
    set(reason "no nvcc on PATH, under CUDA_HOME or in the wheels of this Python" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND "${JAX_TT_NVCC}" --version OUTPUT_VARIABLE text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" matched "${text}")
  set(version "${CMAKE_MATCH_1}")
  if(NOT version OR version VERSION_LESS 12.0)
    set(reason "${JAX_TT_NVCC} is of CUDA '${version}'; 12.0 or newer is needed" PARENT_SCOPE)
    return()
  endif()
  # A host compiler newer than nvcc knows is the usual trouble: better said here than by the first kernel.
  set(probe "${CMAKE_CURRENT_BINARY_DIR}/nvcc_probe.cu")
  file(WRITE "${probe}" "#include <cuda_runtime.h>\n#include <string>\n__global__ void kernel() {}\n")
  execute_process(COMMAND "${JAX_TT_NVCC}" -std=c++20 -ccbin "${CMAKE_CXX_COMPILER}" -c "${probe}" -o "${probe}.o"
    RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(status)
    set(reason "${JAX_TT_NVCC} (CUDA ${version}) does not work with ${CMAKE_CXX_COMPILER}:\n${text}" PARENT_SCOPE)
    return()
  endif()
  # nvcc is often a script or a link; what it calls tells where the toolkit is.
  execute_process(COMMAND "${JAX_TT_NVCC}" --dryrun -x cu -c "${probe}" -o "${probe}.o" ERROR_VARIABLE text OUTPUT_QUIET)
  string(REGEX MATCH "TOP=([^\n]+)" matched "${text}")
  get_filename_component(root "${CMAKE_MATCH_1}" ABSOLUTE)
  set(nvcc "${JAX_TT_NVCC}" PARENT_SCOPE)
  set(nvcc_version "${version}" PARENT_SCOPE)
  set(nvcc_root "${root}" PARENT_SCOPE)
endfunction()

# Sets `capabilities` to what this machine's GPUs can do, as "90": of those that the kernels run on. Sets `has_gpu`, which
# is also true in containers that see the driver and have no nvidia-smi.
function(jax_tt_find_gpus)
  set(numbers)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" numbers "${text}")
    string(REPLACE "." "" numbers "${numbers}")
    list(REMOVE_DUPLICATES numbers)
    list(FILTER numbers EXCLUDE REGEX "^[1-7].$")
  endif()
  set(capabilities "${numbers}" PARENT_SCOPE)
  if(numbers OR EXISTS /dev/nvidiactl)
    set(has_gpu TRUE PARENT_SCOPE)
  else()
    set(has_gpu FALSE PARENT_SCOPE)
  endif()
endfunction()

# Sets `architectures` to the entries to compile, of those that this nvcc knows, `flags` to the -gencode options, and
# `whose` to words for them.
function(jax_tt_gencode)
  execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE known)
  string(APPEND known "\n")
  set(asked "${JAX_TT_CUDA_ARCHITECTURES}")
  set(whose "the GPUs asked for")
  if(asked STREQUAL "native")
    set(architectures native PARENT_SCOPE)
    set(whose "the GPU at hand" PARENT_SCOPE)
    set(flags -arch=native PARENT_SCOPE)
    return()
  elseif(asked STREQUAL "all")
    set(asked 80-real 86-real 89-real 90-real 100-real 120-real 120-virtual)
  elseif(asked STREQUAL "")
    set(asked)
    foreach(number IN LISTS capabilities)
      if(known MATCHES "compute_${number}[^0-9]")
        list(APPEND asked "${number}-real")
      endif()
    endforeach()
    set(whose "the GPU at hand")
    if(NOT asked)
      set(asked 80-real 90-real 80-virtual)
      set(whose "data-centre GPUs")
    endif()
  endif()
  # Of 8.x and 9.0 the machine code is the same, byte for byte, if it is made from the PTX of 8.0 (nothing here is
  # written for 9.0 alone); making that PTX takes the most time, so it is made once.
  set(ampere)
  set(flags)
  set(kept)
  set(newest)
  set(wants_ptx FALSE)
  set(has_ptx FALSE)
  foreach(entry IN LISTS asked)
    if(NOT entry MATCHES "^([0-9]+[af]?)-(real|virtual)$")
      message(FATAL_ERROR "jax_tt: JAX_TT_CUDA_ARCHITECTURES: '${entry}'; expected entries such as 90-real or "
        "90-virtual, or one word: native or all")
    endif()
    set(number "${CMAKE_MATCH_1}")
    set(kind "${CMAKE_MATCH_2}")
    if(kind STREQUAL "virtual")
      set(wants_ptx TRUE)
    endif()
    if(NOT known MATCHES "compute_${number}[^0-9]")
      message(STATUS "jax_tt: CUDA ${nvcc_version} does not compile for ${entry}; left out")
      continue()
    endif()
    list(APPEND kept "${entry}")
    set(newest "${number}")
    if(kind STREQUAL "virtual")
      set(has_ptx TRUE)
      if(number STREQUAL "80")
        list(APPEND ampere compute_80)
      else()
        list(APPEND flags -gencode "arch=compute_${number},code=compute_${number}")
      endif()
    elseif(number MATCHES "^(8[0-9]|90)$")
      list(APPEND ampere "sm_${number}")
    else()
      list(APPEND flags -gencode "arch=compute_${number},code=sm_${number}")
    endif()
  endforeach()
  if(NOT kept)
    message(FATAL_ERROR "jax_tt: CUDA ${nvcc_version} compiles for none of JAX_TT_CUDA_ARCHITECTURES=${asked}")
  endif()
  if(ampere)
    string(JOIN "," codes ${ampere})
    list(PREPEND flags -gencode "arch=compute_80,code=[${codes}]")
  endif()
  if(wants_ptx AND NOT has_ptx)
    # GPUs newer than the compiler run on the newest PTX there is.
    list(APPEND flags -gencode "arch=compute_${newest},code=compute_${newest}")
  endif()
  set(architectures "${kept}" PARENT_SCOPE)
  set(whose "${whose}" PARENT_SCOPE)
  set(flags "${flags}" PARENT_SCOPE)
endfunction()

set(reason)
jax_tt_find_gpus()
if(JAX_TT_CUDA STREQUAL "AUTO" AND NOT has_gpu AND NOT JAX_TT_CUDA_ARCHITECTURES)
  set(reason "this machine has no GPU; JAX_TT_CUDA=ON compiles the kernels for those of data centres")
else()
  jax_tt_find_nvcc()
endif()
if(reason)
  if(NOT JAX_TT_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "jax_tt: JAX_TT_CUDA=ON, but ${reason}\nInstall a CUDA toolkit (12.0 or newer) or the compiler "
      "wheels (pip install 'nvidia-cuda-nvcc>=13,<14'), name it with -DJAX_TT_NVCC=/path/to/nvcc, or set JAX_TT_CUDA=OFF.")
  endif()
  message(STATUS "jax_tt: without CUDA: ${reason}")
  return()
endif()
find_library(JAX_TT_CUDART cudart_static NO_DEFAULT_PATH
  PATHS "${nvcc_root}" "${nvcc_root}/targets/${CMAKE_SYSTEM_PROCESSOR}-linux" "${nvcc_root}/targets/sbsa-linux"
  PATH_SUFFIXES lib64 lib DOC "Static CUDA runtime")
find_path(JAX_TT_CUDA_INCLUDE cuda_runtime.h NO_DEFAULT_PATH
  PATHS "${nvcc_root}" "${nvcc_root}/targets/${CMAKE_SYSTEM_PROCESSOR}-linux" "${nvcc_root}/targets/sbsa-linux"
  PATH_SUFFIXES include DOC "CUDA runtime headers")
if(NOT JAX_TT_CUDART OR NOT JAX_TT_CUDA_INCLUDE)
  message(FATAL_ERROR "jax_tt: ${nvcc_root} holds no ${CMAKE_STATIC_LIBRARY_PREFIX}cudart_static or no cuda_runtime.h. "
    "Install the whole toolkit, or set JAX_TT_CUDA=OFF.")
endif()
jax_tt_gencode()
string(REPLACE ";" ", " text "${architectures}")
message(STATUS "jax_tt: compiling the CUDA module with CUDA ${nvcc_version} at ${nvcc_root} for ${whose}: ${text}. This takes "
  "most of the build, up to an hour on two cores; JAX_TT_CUDA=OFF leaves it out, JAX_TT_CUDA_ARCHITECTURES chooses other GPUs")

# -lineinfo changes no code, but takes a fifth of the time and most of the module's size. The relaxation lets kernels
# call constexpr functions, as C++ would have it.
set(lineinfo)
if(JAX_TT_CUDA_LINEINFO)
  set(lineinfo -lineinfo)
endif()
set(nvcc_flags -std=c++20 -O3 -DNDEBUG ${lineinfo} --expt-relaxed-constexpr -ccbin "${CMAKE_CXX_COMPILER}" "-I${PROJECT_SOURCE_DIR}"
  -Xcompiler=-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden,-Wall,-Wextra
  # Of nvcc's own making: the host code that it generates, and directives that carry GCC's line style.
  -Xcompiler=-Wno-unused-parameter,-Wno-unused-function
  $<$<BOOL:${JAX_TT_WERROR}>:-Werror=all-warnings>)
# Sources that take long come first, so that none of them is left for the end while other cores are idle.
set(cuda_sources ${jax_tt_cu_sources})
list(FILTER cuda_sources EXCLUDE REGEX "/(tt_fast_rank[0-9]+|tt/pass)\\.cu$")
set(long_sources ${jax_tt_cu_sources})
list(REMOVE_ITEM long_sources ${cuda_sources})
set(cuda_objects)
foreach(source IN LISTS long_sources cuda_sources)
  # Operations have files of the same names, so that an object is named after the folder, too.
  string(REGEX REPLACE "^.*/(ffi/cuda|fast_ranks|rules)/" "" name "${source}")
  string(REPLACE "/" "_" name "${name}")
  set(object "${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o")
  set(depfile)
  if(CMAKE_GENERATOR STREQUAL "Ninja" OR CMAKE_VERSION VERSION_GREATER_EQUAL 3.20)
    set(depfile DEPFILE "${object}.d")
  endif()
  add_custom_command(OUTPUT "${object}"
    COMMAND "${CMAKE_COMMAND}" -E make_directory "${CMAKE_CURRENT_BINARY_DIR}/cuda"
    COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} "${nvcc}" ${nvcc_flags} ${flags} -MD -MF "${object}.d" -MT "${object}" -c "${source}" -o "${object}"
    DEPENDS "${source}" ${depfile} COMMENT "nvcc ${name}" COMMAND_EXPAND_LISTS VERBATIM)
  list(APPEND cuda_objects "${object}")
endforeach()

nanobind_add_module(_cuda NB_STATIC NOMINSIZE ${stable_abi} ${jax_tt_cuda_host_sources} ${cuda_objects}
  $<TARGET_OBJECTS:jax_tt_core>)
target_include_directories(_cuda SYSTEM PRIVATE "${JAX_TT_CUDA_INCLUDE}")
target_link_libraries(_cuda PRIVATE jax_tt_options "${JAX_TT_CUDART}" ${CMAKE_DL_LIBS} rt)
list(APPEND jax_tt_modules _cuda)

# What `scripts/kernel_resources.py` compiles once more, for one architecture at a time, to read the compiler's counts.
list(FILTER nvcc_flags EXCLUDE REGEX "Werror")
string(JOIN "\n" text "${nvcc}" ${nvcc_flags})
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/nvcc_command.txt" "${text}\n")
string(JOIN "\n" text ${jax_tt_cu_sources})
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/nvcc_sources.txt" "${text}\n")

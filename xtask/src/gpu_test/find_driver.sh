# Containers often have the driver's library where the loader does not look, or finds another one first.
for folder in /usr/local/nvidia/lib64 /usr/lib/wsl/lib /run/opengl-driver/lib; do
  if [ -e "$folder/libcuda.so.1" ]; then
    export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    break
  fi
done

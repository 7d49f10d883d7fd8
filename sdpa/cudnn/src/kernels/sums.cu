// Corrects the sums of exponentials of rows without keys.

typedef long long number;

// For such rows, engines write -infinity, the logarithm of the sum, instead of the sum, which is 0. One thread per row.
extern "C" __global__ void row_sums(number count, float *sums) {
    number n = (number)blockIdx.x * blockDim.x + threadIdx.x;
    if (n < count && sums[n] < 0.0f) sums[n] = 0.0f;
}

// Sums of exponentials of rows that have no keys.

typedef long long number;

// What engines write as the logarithm of such a sum is the sum here: nothing is 0. A thread for each row.
extern "C" __global__ void row_sums(number count, float *sums) {
    number n = (number)blockIdx.x * blockDim.x + threadIdx.x;
    if (n < count && sums[n] < 0.0f) sums[n] = 0.0f;
}

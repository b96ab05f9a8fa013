/* The host model of CUDA: what fibers.cpp asks of block.cpp at a block's ends. */
#ifndef FP4D_KERNELS_CUDA_MODEL_BLOCK_H
#define FP4D_KERNELS_CUDA_MODEL_BLOCK_H

void cuda_model_block_begin(int threads);
void cuda_model_block_end(); /* fails where a barrier is left half full */

#endif

// The kernels of one instruction set, by name; included by isa.cpp last.
static const Kernels kKernels = {
    FG_ISA_NAME,
    {stats<F32>, stats_f64, stats<F16>, stats<BF16>},
    {scale_f32, scale_f64, scale_f16, scale_bf16},
    {read_words<false>, read_words<true>},
    {{activation<Value32, false>, activation<Value64, false>, activation<Value16, false>, activation<ValueB16, false>},
     {activation<Value32, true>, activation<Value64, true>, activation<Value16, true>, activation<ValueB16, true>}},
    {channels<Value32>, channels<Value64>, channels<Value16>, channels<ValueB16>},
};

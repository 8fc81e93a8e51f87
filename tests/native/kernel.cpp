// A kernel for tests of where kernels are kept: it is built in no time.
extern "C" int cpt_fx_next(int number) { return number + 1; }

/* Starts the bundle's own Python through the bundle's own loader, wherever the bundle lies.
 *
 * It is linked with nothing, so it runs in an image that holds nothing. START is compiled in: the arguments of the
 * executor for `sojourn-executor`, none for `bin/python3`, which Python takes for sys.executable: so whatever starts
 * sys.executable comes through the loader too. DEPTH is how many directories up from the launcher the bundle begins. */

#define PATH_BYTES 4096

#if defined(__x86_64__)
#define SYS_WRITE 1
#define SYS_EXECVE 59
#define SYS_EXIT 60
#define SYS_READLINKAT 267
static long call(long number, long a, long b, long c, long d) {
    long result;
    register long fourth __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth) : "rcx", "r11", "memory");
    return result;
}
__asm__(".globl _start\n_start:\n xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call launch\n");
#elif defined(__aarch64__)
#define SYS_WRITE 64
#define SYS_EXECVE 221
#define SYS_EXIT 93
#define SYS_READLINKAT 78
static long call(long number, long a, long b, long c, long d) {
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}
__asm__(".globl _start\n_start:\n mov x29, #0\n mov x0, sp\n bl launch\n");
#else
#error "the launcher knows x86_64 and aarch64"
#endif

static unsigned long length(const char *text) {
    unsigned long count = 0;
    while (text[count]) count++;
    return count;
}

static void fail(const char *why) {
    call(SYS_WRITE, 2, (long)"sojourn-executor: ", 18, 0);
    call(SYS_WRITE, 2, (long)why, length(why), 0);
    call(SYS_WRITE, 2, (long)"\n", 1, 0);
    call(SYS_EXIT, 127, 0, 0, 0);
}

static int begins(const char *text, const char *with) {
    while (*with)
        if (*text++ != *with++) return 0;
    return 1;
}

static char root[PATH_BYTES], loader[2 * PATH_BYTES], library[2 * PATH_BYTES], python[2 * PATH_BYTES], self[2 * PATH_BYTES];

static char *join(char *into, const char *tail) {
    unsigned long at = length(root);
    for (unsigned long i = 0; i < at; i++) into[i] = root[i];
    for (;; at++, tail++)
        if (!(into[at] = *tail)) return into;
}

__attribute__((used)) void launch(long *stack) {
    long argc = stack[0];
    char **argv = (char **)(stack + 1), **envp = argv + argc + 1, **kept = envp;
    static const char *const start[] = {START 0};

    long got = call(SYS_READLINKAT, -100, (long)"/proc/self/exe", (long)root, PATH_BYTES - 1);
    if (got <= 0 || got >= PATH_BYTES - 1) fail("cannot tell where it lies; is /proc mounted?");
    for (int up = 0; up <= DEPTH; up++)
        while (got > 0 && root[--got] != '/') {}
    root[got] = 0;
    for (long i = 0; i < got; i++)  /* the loader takes both for the end of a directory's name */
        if (root[i] == ':' || root[i] == ';') fail("the path that it lies at must not hold : or ;");

    /* Meant for the image's own C library; in this one they would load what does not fit. LD_LIBRARY_PATH may stay:
     * --library-path stands for it. */
    for (char **entry = envp; *entry; entry++)
        if (!begins(*entry, "LD_PRELOAD=") && !begins(*entry, "LD_AUDIT=")) *kept++ = *entry;
    *kept = 0;

    char *args[argc + 16];
    long at = 0;
    args[at++] = join(loader, "/lib/" LOADER);
    args[at++] = "--inhibit-cache";
    args[at++] = "--library-path";
    args[at++] = join(library, "/lib");
    args[at++] = "--argv0";
    args[at++] = join(self, "/bin/python3");
    args[at++] = join(python, "/lib/python");
    for (long i = 0; start[i]; i++) args[at++] = (char *)start[i];
    for (long i = 1; i < argc; i++) args[at++] = argv[i];
    args[at] = 0;
    call(SYS_EXECVE, (long)args[0], (long)args, (long)envp, 0);
    fail("cannot start its loader; was the whole directory copied?");
}

// The floor that the executor is measured against: the least that an HTTP server which runs commands can do.
//
// One epoll loop answers HTTP/1.1 with keep-alive; the commands are spawned by helper processes that became the
// command user once, at the start, so that each spawn is a plain vfork and exec; what is streamed is spawned by the
// server itself, and becomes the command user between the two. Server and helper speak over a
// SEQPACKET socketpair, one message a request and one an answer. No authentication, no limits, no logs, no timeouts:
// it is a yardstick and must never be reachable by others.
//
//   POST /v1/exec {"command": ["true"]}    -> {"exit_code":0,"stdout":"","stderr":""}
//   same, Accept: ...sojourn.frames        -> the output in frames, by a plain copy loop (it blocks everything else)
//   same, Accept: application/octet-stream -> the output's bytes as they are, likewise
//   PUT  /v1/files?path=NAME               -> the body into a file, and
//   GET  /v1/files?path=NAME               -> the file, each by a plain copy loop between socket and file
//   GET  /healthz                          -> {"status":"ok"}
//
// usage: floor (--tcp PORT | --unix PATH) [--user UID:GID] [--helpers N] [--files DIRECTORY]

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    MAX_CONNECTIONS = 4096,
    MAX_HELPERS = 16,
    MAX_ARGS = 64,
    REQUEST_BYTES = 16384,
    KEPT_BYTES = 32768,  // of each stream, so that an answer fits one message
    MESSAGE_BYTES = 2 * KEPT_BYTES + 64,
    COPY_BYTES = 65536,  // one frame's worth, as the executor's
    BULK_BYTES = 262144,  // where nothing is framed
    COMMANDS_NICE = 10,  // this and the next as the executor's
};

static const char AUTOGROUP_NICE[] = "5";

static char *const COMMAND_ENV[] = {"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/", "LANG=C.UTF-8", NULL};

static void die(const char *what) {
    perror(what);
    exit(1);
}

// ── spawning ───────────────────────────────────────────────────────────────────────────────────────────────────

static int null_fd = -1, is_helper, change_user;
static uid_t user_uid;
static gid_t user_gid;

// Commands give way to other work, as the executor's do: else the two could not be compared on a busy machine.
static void give_way(void) {
    setsid();
    setpriority(PRIO_PROCESS, 0, COMMANDS_NICE);
    int file = open("/proc/self/autogroup", O_WRONLY | O_CLOEXEC);  // none where the kernel knows none
    if (file < 0) return;
    if (write(file, AUTOGROUP_NICE, 1) < 0) perror("autogroup");
    close(file);
}

// For good: whatever is started from here on is the command user's.
static int become_user(void) {
    if (change_user && (setgroups(0, NULL) < 0 || setgid(user_gid) < 0 || setuid(user_uid) < 0)) return -1;
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

// The new process's pid; out and err are the read ends of its pipes. -1 where no process could be made.
static pid_t spawn(char **argv, int *out, int *err) {
    int outs[2], errs[2];
    if (pipe2(outs, O_CLOEXEC) < 0) return -1;
    if (pipe2(errs, O_CLOEXEC) < 0) {
        close(outs[0]), close(outs[1]);
        return -1;
    }
    pid_t pid = vfork();
    if (pid == 0) {
        if (is_helper) setpgid(0, 0);
        else give_way();
        if (!is_helper && become_user() < 0) _exit(126);
        dup2(null_fd, 0), dup2(outs[1], 1), dup2(errs[1], 2);
        signal(SIGPIPE, SIG_DFL);  // vfork shares memory, not signal dispositions
        execvpe(argv[0], argv, COMMAND_ENV);
        _exit(errno == ENOENT ? 127 : 126);
    }
    close(outs[1]), close(errs[1]);
    if (pid < 0) {
        close(outs[0]), close(errs[0]);
        return -1;
    }
    *out = outs[0], *err = errs[0];
    return pid;
}

static int exit_code(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

// ── the helper ─────────────────────────────────────────────────────────────────────────────────────────────────

struct answer {
    uint32_t connection;
    int32_t exit_code;
    uint32_t out_bytes, err_bytes;
};

enum { SOCKET_EVENT, OUT_EVENT, ERR_EVENT, EXIT_EVENT };

struct child {
    uint32_t connection;
    pid_t pid;
    int fds[2], pidfd, open;
    uint32_t kept[2];
    char data[2][KEPT_BYTES];
    struct child *next_free;
};

static struct child *free_children;

static uint64_t tag(struct child *child, int kind) { return (uint64_t)(uintptr_t)child | (unsigned)kind; }

static void answer_for(int sock, struct child *child, int code) {
    struct answer head = {child->connection, code, child->kept[0], child->kept[1]};
    struct iovec parts[3] = {{&head, sizeof head}, {child->data[0], child->kept[0]}, {child->data[1], child->kept[1]}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    if (sendmsg(sock, &message, MSG_NOSIGNAL) < 0) _exit(1);
    child->next_free = free_children, free_children = child;
}

static void reaped(int epoll, int sock, struct child *child) {
    int status;
    pid_t got = waitpid(child->pid, &status, WNOHANG);
    if (got == child->pid) {
        answer_for(sock, child, exit_code(status));
        return;
    }
    // The pipes close a moment before the process can be waited for; only a slow one needs a descriptor to wait on.
    child->pidfd = (int)syscall(SYS_pidfd_open, child->pid, 0);
    if (child->pidfd < 0) {
        waitpid(child->pid, &status, 0);
        answer_for(sock, child, exit_code(status));
        return;
    }
    fcntl(child->pidfd, F_SETFD, FD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = tag(child, EXIT_EVENT)};
    epoll_ctl(epoll, EPOLL_CTL_ADD, child->pidfd, &event);
}

static void take_output(int epoll, int sock, struct child *child, int which) {
    static char surplus[COPY_BYTES];
    uint32_t kept = child->kept[which];
    ssize_t got = kept < KEPT_BYTES ? read(child->fds[which], child->data[which] + kept, KEPT_BYTES - kept)
                                    : read(child->fds[which], surplus, sizeof surplus);
    if (got > 0) {
        if (kept < KEPT_BYTES) child->kept[which] += (uint32_t)got;
        return;
    }
    // The parent of a vfork goes on a moment before the child's exec closes its copies: closing ours alone would leave
    // the registration to come back as an event of a descriptor that is another one by then.
    epoll_ctl(epoll, EPOLL_CTL_DEL, child->fds[which], NULL);
    close(child->fds[which]);
    if (--child->open == 0) reaped(epoll, sock, child);
}

static void start_command(int epoll, int sock, char *message, ssize_t length) {
    char *argv[MAX_ARGS + 1];
    int count = 0;
    for (char *at = message + 4; at < message + length && count < MAX_ARGS; at += strlen(at) + 1) argv[count++] = at;
    argv[count] = NULL;
    struct child *child = free_children;
    if (child) free_children = child->next_free;
    else if (!(child = aligned_alloc(64, (sizeof *child + 63) & ~63UL))) _exit(1);
    memcpy(&child->connection, message, 4);
    child->kept[0] = child->kept[1] = 0;
    child->open = 2;
    child->pid = spawn(argv, &child->fds[0], &child->fds[1]);
    if (child->pid < 0) {
        answer_for(sock, child, 254);
        return;
    }
    for (int which = 0; which < 2; which++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = tag(child, OUT_EVENT + which)};
        epoll_ctl(epoll, EPOLL_CTL_ADD, child->fds[which], &event);
    }
}

static void help(int sock) {
    is_helper = 1;
    give_way();
    if (become_user() < 0) die("becoming the command user");
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // after setuid, which clears it
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = SOCKET_EVENT};
    epoll_ctl(epoll, EPOLL_CTL_ADD, sock, &event);
    static char message[REQUEST_BYTES + 1];
    for (;;) {
        struct epoll_event events[64];
        int count = epoll_wait(epoll, events, 64, -1);
        for (int i = 0; i < count; i++) {
            struct child *child = (struct child *)(uintptr_t)(events[i].data.u64 & ~63UL);
            int kind = (int)(events[i].data.u64 & 63);
            if (kind == SOCKET_EVENT) {
                ssize_t length = recv(sock, message, REQUEST_BYTES, MSG_DONTWAIT);
                if (length == 0) _exit(0);
                if (length > 4) message[length] = 0, start_command(epoll, sock, message, length);
            } else if (kind == EXIT_EVENT) {
                int status = 0;
                epoll_ctl(epoll, EPOLL_CTL_DEL, child->pidfd, NULL);
                close(child->pidfd);
                waitpid(child->pid, &status, 0);
                answer_for(sock, child, exit_code(status));
            } else {
                take_output(epoll, sock, child, kind - OUT_EVENT);
            }
        }
    }
}

// ── HTTP ───────────────────────────────────────────────────────────────────────────────────────────────────────

struct connection {
    int fd;
    uint32_t got;
    char data[REQUEST_BYTES + 1];
};

static struct connection *connections[MAX_CONNECTIONS];
static int helpers[MAX_HELPERS], helper_count = 1;

static void send_all(int fd, struct iovec *parts, int count) {
    // Answers are small and each client waits for its own, so the socket's buffer holds them: a short write is fatal.
    size_t total = 0;
    for (int i = 0; i < count; i++) total += parts[i].iov_len;
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent != (ssize_t)total) shutdown(fd, SHUT_RDWR);
}

static void reply(int fd, int status, const char *body, size_t length) {
    char head[160];
    int head_bytes = snprintf(head, sizeof head,
                              "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", status,
                              status == 200 ? "OK" : "Refused", length);
    struct iovec parts[2] = {{head, (size_t)head_bytes}, {(void *)body, length}};
    send_all(fd, parts, 2);
}

static char *escaped(char *to, const char *from, uint32_t length) {
    for (uint32_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)from[i];
        if (c == '"' || c == '\\') *to++ = '\\', *to++ = (char)c;
        else if (c == '\n') *to++ = '\\', *to++ = 'n';
        else if (c < 32) to += sprintf(to, "\\u%04x", c);
        else *to++ = (char)c;
    }
    return to;
}

static void reply_result(const char *message) {
    static char body[MESSAGE_BYTES * 6 + 128];
    struct answer head;
    memcpy(&head, message, sizeof head);
    const char *out = message + sizeof head;
    struct connection *connection = connections[head.connection];
    if (!connection) return;
    char *at = body + sprintf(body, "{\"exit_code\":%d,\"stdout\":\"", head.exit_code);
    at = escaped(at, out, head.out_bytes);
    at = stpcpy(at, "\",\"stderr\":\"");
    at = escaped(at, out + head.out_bytes, head.err_bytes);
    at = stpcpy(at, "\"}");
    reply(connection->fd, 200, body, (size_t)(at - body));
}

// Copies the JSON string that starts after the quote at `from`, with its final NUL; the place after its closing quote.
static char *json_string(char *from, char **to) {
    char *write = *to;
    for (; *from && *from != '"'; from++) {
        if (*from == '\\' && from[1]) {
            from++;
            *write++ = *from == 'n' ? '\n' : *from == 't' ? '\t' : *from;
        } else {
            *write++ = *from;
        }
    }
    *write++ = 0, *to = write;
    return *from ? from + 1 : from;
}

// The command of an exec body as NUL-ended arguments; how many bytes, 0 where there is none.
static size_t command_of(char *body, char *arguments) {
    char *at = strstr(body, "\"command\""), *write = arguments;
    if (!at) return 0;
    at += strlen("\"command\"");
    at += strspn(at, " :\t\r\n");
    if (*at == '"') {
        write = (char *)memcpy(write, "bash\0-c", 8) + 8;
        json_string(at + 1, &write);
    } else if (*at == '[') {
        for (at++; *at && *at != ']';) {
            if (*at == '"') at = json_string(at + 1, &write);
            else at++;
        }
    }
    return (size_t)(write - arguments);
}

static void write_whole(int fd, struct iovec *parts, int count) {
    while (count > 0) {
        ssize_t sent = writev(fd, parts, count);
        if (sent < 0) {
            if (errno == EINTR) continue;
            return;
        }
        while (count > 0 && (size_t)sent >= parts->iov_len) sent -= (ssize_t)parts->iov_len, parts++, count--;
        if (count > 0) parts->iov_base = (char *)parts->iov_base + sent, parts->iov_len -= (size_t)sent;
    }
}

// A socket that a copy loop blocks on, and back.
static int blocking(int fd) {
    int flags = fcntl(fd, F_GETFL);
    fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
    return flags;
}

static void write_text(int fd, const char *text) {
    struct iovec part = {(char *)text, strlen(text)};
    write_whole(fd, &part, 1);
}

// The read end of the command's output, with a pipe as wide as the executor's; -1 where no process could be made.
static int start_stream(char *arguments, size_t length, pid_t *pid, int *err) {
    char *argv[MAX_ARGS + 1];
    int count = 0, out = -1;
    for (char *at = arguments; at < arguments + length && count < MAX_ARGS; at += strlen(at) + 1) argv[count++] = at;
    argv[count] = NULL;
    *pid = spawn(argv, &out, err);
    if (*pid < 0) return -1;
    fcntl(out, F_SETPIPE_SZ, 1 << 20);
    return out;
}

// The output as it comes, in the executor's framing: the reference for output in frames.
static void stream_frames(int fd, char *arguments, size_t length) {
    static char data[COPY_BYTES];
    char head[32], exit_json[64];
    int err, status = 0, bytes;
    pid_t pid;
    int out = start_stream(arguments, length, &pid, &err);
    if (out < 0) return;
    write_text(fd, "HTTP/1.1 200 OK\r\nContent-Type: application/vnd.sojourn.frames\r\n"
                   "Transfer-Encoding: chunked\r\n\r\n");
    uint64_t offset = 0;
    for (ssize_t got; (got = read(out, data, sizeof data)) > 0; offset += (uint64_t)got) {
        unsigned char frame[13] = {2};
        for (int i = 0; i < 4; i++) frame[1 + i] = (unsigned char)((uint32_t)(got + 8) >> (24 - 8 * i));
        for (int i = 0; i < 8; i++) frame[5 + i] = (unsigned char)(offset >> (56 - 8 * i));
        bytes = sprintf(head, "%zx\r\n", (size_t)got + sizeof frame);
        struct iovec parts[4] = {{head, (size_t)bytes}, {frame, sizeof frame}, {data, (size_t)got}, {"\r\n", 2}};
        write_whole(fd, parts, 4);
    }
    close(out), close(err);
    waitpid(pid, &status, 0);
    int json_bytes = sprintf(exit_json, "{\"type\":\"exit\",\"exit_code\":%d}", exit_code(status));
    unsigned char frame[5] = {6, 0, 0, 0, (unsigned char)json_bytes};
    bytes = sprintf(head, "%x\r\n", json_bytes + 5);
    struct iovec parts[4] = {{head, (size_t)bytes}, {frame, 5}, {exit_json, (size_t)json_bytes}, {"\r\n0\r\n\r\n", 7}};
    write_whole(fd, parts, 4);
}

// The output's bytes as they are: the reference for raw output.
static void stream_raw(int fd, char *arguments, size_t length) {
    static char data[BULK_BYTES];
    char head[32];
    int err, status;
    pid_t pid;
    int out = start_stream(arguments, length, &pid, &err);
    if (out < 0) return;
    write_text(fd, "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
    for (ssize_t got; (got = read(out, data, sizeof data)) > 0;) {
        int bytes = sprintf(head, "%zx\r\n", (size_t)got);
        struct iovec parts[3] = {{head, (size_t)bytes}, {data, (size_t)got}, {"\r\n", 2}};
        write_whole(fd, parts, 3);
    }
    close(out), close(err);
    waitpid(pid, &status, 0);
    write_text(fd, "0\r\n\r\n");
}

// ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────

static int files_directory = -1;
static char bulk[BULK_BYTES];

static int open_named(const char *request, const char *before, int flags) {
    char name[128];
    if (files_directory < 0 || sscanf(request + strlen(before), "%127[A-Za-z0-9_]", name) != 1) return -1;
    return openat(files_directory, name, flags | O_CLOEXEC | O_NOFOLLOW, 0644);
}

// `have` bytes of the body came with the head; the rest is read from the socket as it comes.
static void take_file(int fd, const char *request, size_t length, const char *body, size_t have) {
    int file = open_named(request, "PUT /v1/files?path=", O_WRONLY | O_CREAT | O_TRUNC), flags = blocking(fd);
    size_t left = length - have;
    int good = file >= 0 && write(file, body, have) == (ssize_t)have;
    while (left) {
        ssize_t got = recv(fd, bulk, left < sizeof bulk ? left : sizeof bulk, 0);
        if (got <= 0) break;
        left -= (size_t)got;
        good = good && write(file, bulk, (size_t)got) == got;
    }
    if (file >= 0) close(file);
    fcntl(fd, F_SETFL, flags);
    reply(fd, good && !left ? 200 : 400, "{}", 2);
}

static void give_file(int fd, const char *request) {
    char head[96];
    struct stat status;
    int file = open_named(request, "GET /v1/files?path=", O_RDONLY);
    if (file < 0 || fstat(file, &status) < 0) {
        if (file >= 0) close(file);
        reply(fd, 404, "{}", 2);
        return;
    }
    int flags = blocking(fd);
    sprintf(head, "HTTP/1.1 200 OK\r\nContent-Length: %lld\r\n\r\n", (long long)status.st_size);
    write_text(fd, head);
    for (ssize_t got; (got = read(file, bulk, sizeof bulk)) > 0;) {
        struct iovec part = {bulk, (size_t)got};
        write_whole(fd, &part, 1);
    }
    close(file);
    fcntl(fd, F_SETFL, flags);
}

static void handle(uint32_t id, char *request, char *body) {
    static char message[REQUEST_BYTES + 16];
    static unsigned turn;
    int fd = connections[id]->fd;
    if (!strncmp(request, "GET /healthz ", 13)) {
        reply(fd, 200, "{\"status\":\"ok\"}", 15);
        return;
    }
    if (!strncmp(request, "GET /v1/files?path=", 19)) {
        give_file(fd, request);
        return;
    }
    memcpy(message, &id, 4);
    size_t length = strncmp(request, "POST /v1/exec ", 14) ? 0 : command_of(body, message + 4);
    if (!length) {
        reply(fd, 400, "{}", 2);
        return;
    }
    body[-1] = 0;  // ends the header where strcasestr looks
    int frames = strcasestr(request, "\r\nAccept: application/vnd.sojourn.frames") != NULL;
    if (frames || strcasestr(request, "\r\nAccept: application/octet-stream")) {
        int flags = blocking(fd);
        (frames ? stream_frames : stream_raw)(fd, message + 4, length);
        fcntl(fd, F_SETFL, flags);
        return;
    }
    if (send(helpers[turn++ % (unsigned)helper_count], message, length + 4, MSG_NOSIGNAL) < 0) die("helper");
}

static void hang_up(uint32_t id) {
    close(connections[id]->fd);
    free(connections[id]);
    connections[id] = NULL;
}

static void take_request(uint32_t id) {
    struct connection *c = connections[id];
    ssize_t got = recv(c->fd, c->data + c->got, REQUEST_BYTES - c->got, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
        hang_up(id);
        return;
    }
    c->got += (uint32_t)got;
    c->data[c->got] = 0;
    char *end = strstr(c->data, "\r\n\r\n");
    if (!end) return;
    char *length_at = strcasestr(c->data, "\r\nContent-Length:");
    size_t length = length_at && length_at < end ? strtoul(length_at + 17, NULL, 10) : 0;
    size_t have = c->got - (size_t)(end + 4 - c->data);
    if (!strncmp(c->data, "PUT /v1/files?path=", 19)) {
        c->got = 0;
        take_file(c->fd, c->data, length, end + 4, have < length ? have : length);
        return;
    }
    if (have < length) return;
    c->got = 0;  // no pipelining: the next request comes after this one's answer
    handle(id, c->data, end + 4);
}

static int listen_at(const char *port, const char *path) {
    int sock;
    if (path) {
        struct sockaddr_un at = {.sun_family = AF_UNIX};
        snprintf(at.sun_path, sizeof at.sun_path, "%s", path);
        sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (sock < 0 || bind(sock, (struct sockaddr *)&at, sizeof at) < 0) die(path);
    } else {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
        int one = 1;
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (sock < 0 || bind(sock, (struct sockaddr *)&at, sizeof at) < 0) die(port);
    }
    if (listen(sock, 4096) < 0) die("listen");
    return sock;
}

static void accept_all(int epoll, int listener) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) {
        uint32_t id = 0;
        int one = 1;
        while (id < MAX_CONNECTIONS && connections[id]) id++;
        if (id == MAX_CONNECTIONS || !(connections[id] = malloc(sizeof **connections))) {
            close(fd);
            continue;
        }
        connections[id]->fd = fd, connections[id]->got = 0;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = id};
        epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
    }
}

int main(int argc, char **argv) {
    const char *port = NULL, *path = NULL;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--tcp")) port = argv[i + 1];
        else if (!strcmp(argv[i], "--unix")) path = argv[i + 1];
        else if (!strcmp(argv[i], "--user")) change_user = sscanf(argv[i + 1], "%u:%u", &user_uid, &user_gid) == 2;
        else if (!strcmp(argv[i], "--helpers")) helper_count = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--files")) {
            files_directory = open(argv[i + 1], O_PATH | O_DIRECTORY | O_CLOEXEC);
            if (files_directory < 0) die(argv[i + 1]);
        }
    }
    if (!port == !path || helper_count < 1 || helper_count > MAX_HELPERS) {
        fprintf(stderr, "usage: floor (--tcp PORT | --unix PATH) [--user UID:GID] [--helpers 1..%d] [--files DIRECTORY]\n",
                MAX_HELPERS);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // a benchmark that was killed leaves no server behind
    struct rlimit files = {0};
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int i = 0; i < helper_count; i++) {
        int pair[2], bytes = 1 << 20;
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) die("socketpair");
        setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        pid_t pid = fork();
        if (pid < 0) die("fork");
        if (pid == 0) {
            for (int other = 0; other < i; other++) close(helpers[other]);
            close(pair[0]);
            help(pair[1]);
        }
        close(pair[1]);
        helpers[i] = pair[0];
    }
    int epoll = epoll_create1(EPOLL_CLOEXEC), listener = listen_at(port, path);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = UINT64_MAX};
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    for (int i = 0; i < helper_count; i++) {
        event.data.u64 = MAX_CONNECTIONS + (uint64_t)i;
        epoll_ctl(epoll, EPOLL_CTL_ADD, helpers[i], &event);
    }
    static char message[MESSAGE_BYTES];
    for (;;) {
        struct epoll_event events[64];
        int count = epoll_wait(epoll, events, 64, -1);
        for (int i = 0; i < count; i++) {
            uint64_t id = events[i].data.u64;
            if (id == UINT64_MAX) accept_all(epoll, listener);
            else if (id < MAX_CONNECTIONS) take_request((uint32_t)id);
            else {
                ssize_t got = recv(helpers[id - MAX_CONNECTIONS], message, sizeof message, MSG_DONTWAIT);
                if (got == 0) {
                    fprintf(stderr, "floor: a helper died\n");
                    return 1;
                }
                if (got >= (ssize_t)sizeof(struct answer)) reply_result(message);
            }
        }
    }
}

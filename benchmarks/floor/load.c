// The load client of the benchmarks, the same for every server: closed-loop HTTP/1.1 over kept-alive connections.
//
// Each connection sends a fixed request, waits for the whole answer, checks it, and sends the next. What comes out is
// one line of JSON on stdout: requests, errors, throughput and latencies in microseconds. It exits with 0 also where
// answers were wrong (`errors` counts them, `first_error` shows one), with 2 where nothing could be measured.
//
// usage: load (--tcp PORT | --unix PATH) [options]
//   --connections N     at once (1)
//   --seconds S         measure this long, after --warmup seconds that do not count
//   --count N           or send N requests in all
//   --method M --path P --header 'Name: value' (repeatable) --body TEXT
//   --expect TEXT       what a right answer's body contains; "{n}" in it and in the body is the request's number
//   --pace-ms N         between two requests of a connection, counted from the earlier one's start (0: none)
//   --until-stdin-ends  stop early, when stdin is closed
//   --stall-sec N       give up when nothing at all arrives for so long (30)
//   --frames            one request whose answer is a stream of frames: count its output, check that nothing is missing

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
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
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 4096, MAX_ANSWER_BYTES = 1 << 22, READ_BYTES = 1 << 18 };

static const char *port, *unix_path, *method = "GET", *path = "/healthz", *body = "", *expect = "";
static char headers[8192];
static int connection_count = 1, frames, until_stdin_ends;
static double measure_sec = 1, warmup_sec, stall_sec = 30, pace_ms;
static long request_count;

static void fail(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, errno ? strerror(errno) : "failed");
    exit(2);
}

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static int connected(void) {
    int fd, one = 1, done;
    if (unix_path) {
        struct sockaddr_un at = {.sun_family = AF_UNIX};
        snprintf(at.sun_path, sizeof at.sun_path, "%s", unix_path);
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        done = connect(fd, (struct sockaddr *)&at, sizeof at);
    } else {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        done = connect(fd, (struct sockaddr *)&at, sizeof at);
    }
    if (fd < 0 || done < 0) fail("connect");
    return fd;
}

// `text` with each "{n}" replaced by the number; to be freed.
static char *numbered(const char *text, long number) {
    char digits[24], *whole = malloc(strlen(text) * 8 + 1), *to = whole;
    if (!whole) fail("memory");
    snprintf(digits, sizeof digits, "%ld", number);
    while (*text) {
        if (!strncmp(text, "{n}", 3)) to = stpcpy(to, digits), text += 3;
        else *to++ = *text++;
    }
    *to = 0;
    return whole;
}

static char *request_for(long number, size_t *length) {
    char *text = numbered(body, number), *whole = NULL;
    int made = asprintf(&whole, "%s %s HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %zu\r\n\r\n%s", method, path,
                        headers, strlen(text), text);
    if (made < 0) fail("memory");
    *length = (size_t)made;
    free(text);
    return whole;
}

// ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────

// Where a whole answer stands in `data`: its bytes in all; 0 where more must come, -1 where it is no HTTP. A chunked
// body is joined in place, so that `text` and `length` are the body either way.
static long whole_answer(char *data, long got, int *status, char **text, long *length) {
    data[got] = 0;
    char *end = strstr(data, "\r\n\r\n");
    if (!end) return got > 65536 ? -1 : 0;
    if (sscanf(data, "HTTP/1.1 %d", status) != 1) return -1;
    char *at = end + 4, *sized = strcasestr(data, "\r\nContent-Length:"), *chunked = strcasestr(data, "\r\nTransfer-Encoding: chunked");
    *text = at;
    if (sized && sized < end) {
        *length = strtol(sized + 17, NULL, 10);
        return at + *length <= data + got ? at + *length - data : 0;
    }
    if (!chunked || chunked > end) return -1;
    // Joining moves bytes, so it must wait until the last chunk is there.
    for (char *look = at;;) {
        char *line = strstr(look, "\r\n");
        if (!line) return 0;
        long size = strtol(look, NULL, 16);
        look = line + 2 + size + 2;
        if (look > data + got) return 0;
        if (size == 0) break;
    }
    char *to = at;
    for (;;) {
        char *line = strstr(at, "\r\n");
        long size = strtol(at, NULL, 16);
        at = line + 2 + size + 2;
        if (size == 0) break;
        memmove(to, line + 2, (size_t)size), to += size;
    }
    *length = to - *text;
    return at - data;
}

// ── many small requests ────────────────────────────────────────────────────────────────────────────────────────

struct connection {
    int fd;
    char *request;
    long number, got, room;
    size_t length;
    uint64_t started_ns, due_ns;  // due_ns 0: a request is under way
    char *data;
};

static struct connection connections[MAX_CONNECTIONS];
static uint64_t *latencies_ns;
static long measured, room, sent, finished, errors;
static char first_error[400];

static void wrong(const char *what, const char *text, long length) {
    if (errors++) return;
    int at = snprintf(first_error, sizeof first_error, "%s: ", what);
    for (long i = 0; i < length && at < (int)sizeof first_error - 2; i++)
        first_error[at++] = text[i] < 32 || text[i] == '"' || text[i] == '\\' || text[i] > 126 ? ' ' : text[i];
    first_error[at] = 0;
}

static void send_next(struct connection *c) {
    if (!c->request || strstr(body, "{n}")) {
        free(c->request);
        c->request = request_for(sent, &c->length);
    }
    c->number = sent++, c->got = 0, c->due_ns = 0, c->started_ns = now_ns();
    if (send(c->fd, c->request, c->length, MSG_NOSIGNAL) != (ssize_t)c->length) fail("send");
}

static void keep(uint64_t ns) {
    if (measured == room) {
        room = room ? room * 2 : 65536;
        if (!(latencies_ns = realloc(latencies_ns, (size_t)room * sizeof *latencies_ns))) fail("memory");
    }
    latencies_ns[measured++] = ns;
}

// Reads what there is; 1 where the answer is complete.
static int take(struct connection *c, uint64_t measure_from_ns) {
    if (c->room - c->got < READ_BYTES / 4) {
        c->room = c->room ? c->room * 2 : READ_BYTES;
        if (c->room > MAX_ANSWER_BYTES) fail("an answer is too long");
        if (!(c->data = realloc(c->data, (size_t)c->room + 1))) fail("memory");
    }
    ssize_t got = recv(c->fd, c->data + c->got, (size_t)(c->room - c->got), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (got < 0 && errno != ECONNRESET) fail("recv");
    int status = 0;
    long length = 0, whole = -1;
    char *text = "";
    if (got > 0) {
        c->got += got;
        whole = whole_answer(c->data, c->got, &status, &text, &length);
        if (whole == 0) return 0;
    }
    uint64_t now = now_ns();
    finished++;
    if (whole < 0) {
        wrong(got <= 0 ? "hung up" : "not HTTP", c->data, c->got);
        close(c->fd);
        c->fd = -1;
        return 1;
    }
    char *expected = numbered(expect, c->number);
    if (status != 200 || !memmem(text, (size_t)length, expected, strlen(expected))) wrong(status == 200 ? "unexpected" : "status", c->data, c->got);
    free(expected);
    if (now >= measure_from_ns) keep(now - c->started_ns);
    return 1;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static double percentile_us(double share) {
    if (!measured) return 0;
    long at = (long)(share * (double)measured);
    return (double)latencies_ns[at < measured ? at : measured - 1] / 1e3;
}

static void load(void) {
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < connection_count; i++) {
        connections[i].fd = connected();
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
        epoll_ctl(epoll, EPOLL_CTL_ADD, connections[i].fd, &event);
    }
    if (until_stdin_ends) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = MAX_CONNECTIONS};
        epoll_ctl(epoll, EPOLL_CTL_ADD, 0, &event);
    }
    uint64_t begin_ns = now_ns(), from_ns = begin_ns + (uint64_t)(warmup_sec * 1e9), last_ns = begin_ns;
    uint64_t until_ns = request_count ? UINT64_MAX : from_ns + (uint64_t)(measure_sec * 1e9);
    uint64_t pace_ns = (uint64_t)(pace_ms * 1e6);
    for (int i = 0; i < connection_count && (!request_count || sent < request_count); i++) send_next(&connections[i]);
    while (request_count ? finished < request_count : finished < sent || now_ns() < until_ns) {
        struct epoll_event events[256];
        int paced = 0, count = epoll_wait(epoll, events, 256, pace_ns ? 1 : 100);
        uint64_t now = now_ns();
        for (int i = 0; i < count; i++) {
            if (events[i].data.u32 == MAX_CONNECTIONS) {
                epoll_ctl(epoll, EPOLL_CTL_DEL, 0, NULL);
                until_ns = now;
                continue;
            }
            struct connection *c = &connections[events[i].data.u32];
            last_ns = now;
            if (!take(c, from_ns)) continue;
            if (c->fd < 0) {
                c->fd = connected();
                struct epoll_event event = {.events = EPOLLIN, .data.u32 = events[i].data.u32};
                epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event);
            }
            if (request_count ? sent >= request_count : now >= until_ns) continue;
            if (pace_ns && c->started_ns + pace_ns > now) c->due_ns = c->started_ns + pace_ns;
            else send_next(c);
        }
        for (int i = 0; pace_ns && i < connection_count; i++) {
            if (!connections[i].due_ns) continue;
            paced = 1;
            if (now < connections[i].due_ns || now >= until_ns) continue;
            if (!request_count || sent < request_count) send_next(&connections[i]);
        }
        if (!count && !paced && (double)(now - last_ns) > stall_sec * 1e9) {
            wrong("nothing arrived for too long", "", 0);
            break;
        }
    }
    // The tail after the deadline is measured too, or the slowest requests would never count; the rate ends with it.
    double seconds = last_ns > from_ns ? (double)(last_ns - from_ns) / 1e9 : 0;
    qsort(latencies_ns, (size_t)measured, sizeof *latencies_ns, by_size);
    printf("{\"requests\":%ld,\"errors\":%ld,\"seconds\":%.6f,\"per_sec\":%.3f,\"p50_us\":%.1f,\"p90_us\":%.1f,"
           "\"p99_us\":%.1f,\"max_us\":%.1f,\"first_error\":\"%s\"}\n",
           measured, errors + (sent - finished), seconds, seconds > 0 ? (double)measured / seconds : 0,
           percentile_us(0.5), percentile_us(0.9), percentile_us(0.99), percentile_us(1), first_error);
}

// ── one streamed command ───────────────────────────────────────────────────────────────────────────────────────

static struct {
    unsigned char head[13];
    uint32_t head_bytes, left, kind;  // of the frame that is coming in
    uint64_t out_bytes, err_bytes, gaps, heartbeats, misplaced;
    char exit_json[4096];
    uint32_t exit_bytes;
    int ended;
} stream;

static uint64_t big_endian(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | *at++;
    return value;
}

static void take_frames(const unsigned char *data, size_t length) {
    while (length) {
        uint32_t need = stream.head_bytes >= 5 && (stream.kind == 2 || stream.kind == 3) ? 13 : 5;
        if (stream.head_bytes < need) {
            stream.head[stream.head_bytes++] = *data++, length--;
            if (stream.head_bytes == 5) {
                stream.kind = stream.head[0], stream.left = (uint32_t)big_endian(stream.head + 1, 4);
                stream.gaps += stream.kind == 5, stream.heartbeats += stream.kind == 4;
            } else if (stream.head_bytes == 13) {
                uint64_t *total = stream.kind == 2 ? &stream.out_bytes : &stream.err_bytes;
                stream.misplaced += big_endian(stream.head + 5, 8) != *total;
                stream.left -= 8;
            }
        } else {
            size_t piece = length < stream.left ? length : stream.left;
            if (stream.kind == 2) stream.out_bytes += piece;
            else if (stream.kind == 3) stream.err_bytes += piece;
            else if (stream.kind == 6 || stream.kind == 7) {
                for (size_t i = 0; i < piece && stream.exit_bytes < sizeof stream.exit_json - 1; i++)
                    stream.exit_json[stream.exit_bytes++] = (char)data[i];
            }
            data += piece, length -= piece, stream.left -= (uint32_t)piece;
        }
        need = stream.head_bytes >= 5 && (stream.kind == 2 || stream.kind == 3) ? 13 : 5;
        if (stream.head_bytes == need && stream.left == 0) {
            stream.ended |= stream.kind == 6;
            stream.head_bytes = 0, stream.kind = 0;
        }
    }
}

// The body's bytes out of the chunks they came in; 0 at the last chunk.
static int take_chunks(const unsigned char *data, size_t length) {
    static char line[32];
    static size_t line_bytes, left;
    static int in_data, skip;
    while (length) {
        if (skip) {
            size_t piece = length < (size_t)skip ? length : (size_t)skip;
            data += piece, length -= piece, skip -= (int)piece;
        } else if (in_data) {
            size_t piece = length < left ? length : left;
            take_frames(data, piece);
            data += piece, length -= piece, left -= piece;
            if (!left) in_data = 0, skip = 2;
        } else {
            char c = (char)*data++;
            length--;
            if (c != '\n') {
                if (line_bytes < sizeof line - 1) line[line_bytes++] = c;
                continue;
            }
            line[line_bytes] = 0, line_bytes = 0;
            left = strtoul(line, NULL, 16);
            if (!left) return 0;
            in_data = 1;
        }
    }
    return 1;
}

static void read_stream(void) {
    static unsigned char data[READ_BYTES + 1];
    int fd = connected(), in_body = 0, chunked = 0, status = 0;
    size_t length, got = 0;
    struct timeval limit = {.tv_sec = (time_t)stall_sec};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    char *request = request_for(0, &length);
    uint64_t begin_ns = now_ns(), first_ns = 0;
    if (send(fd, request, length, MSG_NOSIGNAL) != (ssize_t)length) fail("send");
    while (!stream.ended) {
        ssize_t more = recv(fd, data + got, READ_BYTES - got, 0);
        if (more < 0) fail("recv");
        if (more == 0) break;
        got += (size_t)more;
        unsigned char *at = data;
        if (!in_body) {
            data[got] = 0;
            char *end = strstr((char *)data, "\r\n\r\n");
            if (!end) continue;
            if (sscanf((char *)data, "HTTP/1.1 %d", &status) != 1 || status != 200) {
                fprintf(stderr, "load: %.400s\n", (char *)data);
                exit(2);
            }
            *end = 0, chunked = strcasestr((char *)data, "\r\nTransfer-Encoding: chunked") != NULL;
            at = (unsigned char *)end + 4, in_body = 1;
        }
        size_t bytes = got - (size_t)(at - data);
        if (chunked) {
            if (!take_chunks(at, bytes)) break;
        } else {
            take_frames(at, bytes);
        }
        if (!first_ns && stream.out_bytes + stream.err_bytes) first_ns = now_ns();
        got = 0;
    }
    uint64_t end_ns = now_ns();
    stream.exit_json[stream.exit_bytes] = 0;
    printf("{\"stdout_bytes\":%lu,\"stderr_bytes\":%lu,\"seconds\":%.6f,\"first_byte_us\":%.1f,\"gaps\":%lu,"
           "\"misplaced\":%lu,\"heartbeats\":%lu,\"ended\":%s,\"exit\":%s}\n",
           stream.out_bytes, stream.err_bytes, (double)(end_ns - begin_ns) / 1e9,
           first_ns ? (double)(first_ns - begin_ns) / 1e3 : 0.0, stream.gaps, stream.misplaced, stream.heartbeats,
           stream.ended ? "true" : "false", stream.exit_bytes ? stream.exit_json : "null");
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (!strcmp(name, "--frames") || !strcmp(name, "--until-stdin-ends")) {
            *(name[2] == 'f' ? &frames : &until_stdin_ends) = 1;
            continue;
        }
        if (++i >= argc) fail(name);
        const char *value = argv[i];
        if (!strcmp(name, "--tcp")) port = value;
        else if (!strcmp(name, "--unix")) unix_path = value;
        else if (!strcmp(name, "--connections")) connection_count = atoi(value);
        else if (!strcmp(name, "--seconds")) measure_sec = atof(value);
        else if (!strcmp(name, "--warmup")) warmup_sec = atof(value);
        else if (!strcmp(name, "--count")) request_count = atol(value);
        else if (!strcmp(name, "--method")) method = value;
        else if (!strcmp(name, "--path")) path = value;
        else if (!strcmp(name, "--body")) body = value;
        else if (!strcmp(name, "--expect")) expect = value;
        else if (!strcmp(name, "--pace-ms")) pace_ms = atof(value);
        else if (!strcmp(name, "--stall-sec")) stall_sec = atof(value);
        else if (!strcmp(name, "--header")) {
            size_t used = strlen(headers);
            snprintf(headers + used, sizeof headers - used, "%s\r\n", value);
        } else fail(name);
    }
    if (!port == !unix_path || connection_count < 1 || connection_count > MAX_CONNECTIONS) fail("one of --tcp and --unix");
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    struct rlimit files = {0};
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    if (frames) read_stream();
    else load();
    return 0;
}

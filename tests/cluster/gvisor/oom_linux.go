// Package sys, in place of containerd's file of this name in the build of gVisor's shim: to how the kernel chooses a
// process when memory is out. The shim asks never to be chosen, and gives up where that is refused, as it is to a root
// without CAP_SYS_RESOURCE (proc_pid_oom_score_adj(5)); here it then goes on as any process. containerd itself has a
// setting for that, `restrict_oom_score_adj`.
package sys

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// The range of /proc/PID/oom_score_adj.
const (
	OOMScoreAdjMin = -1000
	OOMScoreAdjMax = 1000
)

func place(pid int) string {
	return fmt.Sprintf("/proc/%d/oom_score_adj", pid)
}

// AdjustOOMScore sets the score that is nearest to `score`.
func AdjustOOMScore(pid, score int) error {
	return SetOOMScore(pid, min(max(score, OOMScoreAdjMin), OOMScoreAdjMax))
}

// SetOOMScore sets the score; where that is not permitted it stays as it is.
func SetOOMScore(pid, score int) error {
	err := os.WriteFile(place(pid), []byte(strconv.Itoa(score)), 0)
	if errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return err
}

// GetOOMScoreAdj is the score of a process.
func GetOOMScoreAdj(pid int) (int, error) {
	text, err := os.ReadFile(place(pid))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

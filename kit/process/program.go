// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// mapping is a range of addresses of the process.
type mapping struct{ from, to uintptr }

// programMappings finds, in the format of /proc/self/smaps, the read-only mappings of a file that
// have no copied page: their content can be read from the file again.
func programMappings(smaps io.Reader, file string) (clean []mapping, err error) {
	var m mapping
	candidate := false
	lines := bufio.NewScanner(smaps)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		switch {
		case len(fields) >= 5 && !strings.HasSuffix(fields[0], ":"): // from-to rights offset device inode [path]
			if _, err := fmt.Sscanf(fields[0], "%x-%x", &m.from, &m.to); err != nil {
				return nil, fmt.Errorf("address range %q: %w", fields[0], err)
			}
			candidate = strings.Join(fields[5:], " ") == file && !strings.Contains(fields[1], "w")
		case candidate && fields[0] == "Anonymous:" && fields[1] == "0":
			clean = append(clean, m)
		}
	}
	return clean, lines.Err()
}

// unmapProgram unmaps the resident pages of the program file. They stay in the page cache and are
// mapped again on their next use. Most of them were only needed during start-up.
func unmapProgram() error {
	file, err := os.Readlink("/proc/self/exe") // a deleted file has the suffix " (deleted)", as in smaps
	if err != nil {
		return err
	}
	smaps, err := os.Open("/proc/self/smaps")
	if err != nil {
		return err
	}
	defer smaps.Close()
	clean, err := programMappings(smaps, file)
	for _, m := range clean {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.from, m.to-m.from, unix.MADV_DONTNEED); errno != 0 {
			err = errors.Join(err, fmt.Errorf("madvise %x-%x: %w", m.from, m.to, errno))
		}
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"errors"
	"io"
	"os"
	"sync"
)

// merge copies the lines of several streams to out as they arrive, each line whole. It returns when every stream has
// ended.
func merge(out io.Writer, names []string) error {
	errs := make([]error, len(names))
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() {
			in, err := os.Open(name)
			if err != nil {
				errs[i] = err
				return
			}
			defer in.Close()
			lines := bufio.NewReader(in)
			for {
				line, err := lines.ReadBytes('\n')
				if len(line) > 0 {
					mu.Lock()
					_, werr := out.Write(line)
					mu.Unlock()
					err = errors.Join(err, werr)
				}
				if err != nil {
					if !errors.Is(err, io.EOF) {
						errs[i] = err
					}
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

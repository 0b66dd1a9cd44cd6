// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/nodefiles"
)

// part is one part of an installation.
type part struct {
	Name    string `json:"name"`
	Path    string `json:"path"`
	Problem string `json:"problem,omitempty"`
}

// checkParts checks the parts that install and cni create.
func checkParts(p instance.Paths, o options) (parts []part) {
	add := func(name, path string, err error) {
		one := part{Name: name, Path: path}
		if err != nil {
			one.Problem = err.Error()
		}
		parts = append(parts, one)
	}
	for _, f := range nodefiles.Check(p, nodefiles.Services()...) {
		add(f.Kind, f.Path, f.Problem)
	}
	target := filepath.Join(o.plugins, plugin)
	info, err := os.Stat(target)
	if err == nil && (!info.Mode().IsRegular() || info.Mode().Perm()&0o111 != 0o111) {
		err = fmt.Errorf("has the mode %s", info.Mode())
	}
	add("plugin", target, err)
	c := o.configuration(p)
	content, err := c.read()
	if err == nil && content == nil {
		err = errors.New("is missing; `sluice node cni` writes it once containers can be connected")
	}
	add("configuration", c.path(), err)
	if names, err := c.preferred(); err != nil || len(names) > 0 {
		if err == nil {
			err = fmt.Errorf("the runtime prefers %s", strings.Join(names, ", "))
		}
		add("configurations", c.directory, err)
	}
	return parts
}

func show(inv *invocation.Invocation, parts []part) error {
	bad := 0
	for _, p := range parts {
		if p.Problem != "" {
			bad++
		}
	}
	err := inv.Show(parts, func(w io.Writer) {
		fmt.Fprintln(w, "PART\tPATH\tSTATE")
		for _, p := range parts {
			state := "ok"
			if p.Problem != "" {
				state = p.Problem
			}
			fmt.Fprintf(w, "%s\t%s\t%s\n", p.Name, p.Path, state)
		}
	})
	if err == nil && bad > 0 {
		err = invocation.ErrNotReady
	}
	return err
}

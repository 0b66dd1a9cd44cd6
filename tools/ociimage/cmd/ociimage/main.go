// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command ociimage writes a container image from files of this machine.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"

	"github.com/sluice-net/sluice/tools/ociimage"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "ociimage:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	img := ociimage.Image{Labels: map[string]string{}}
	flags := flag.NewFlagSet("ociimage", flag.ExitOnError)
	out := flags.String("output", "", "archive to write")
	flags.StringVar(&img.Name, "name", "", "image reference, such as example.org/app:v1")
	flags.StringVar(&img.Architecture, "architecture", "", "architecture of the programs, as GOARCH")
	pair := func(name, usage string, add func(key, value string)) {
		flags.Func(name, usage, func(s string) error {
			key, value, ok := strings.Cut(s, "=")
			if !ok || key == "" || value == "" {
				return errors.New("want KEY=VALUE")
			}
			add(key, value)
			return nil
		})
	}
	pair("file", "`PATH=SOURCE`: add an executable file; may be repeated", func(path, source string) {
		img.Files = append(img.Files, ociimage.File{Path: path, Source: source})
	})
	pair("link", "`PATH=TARGET`: add a symbolic link; may be repeated", func(path, target string) {
		img.Files = append(img.Files, ociimage.File{Path: path, Link: target})
	})
	pair("label", "`KEY=VALUE`: set a label of the image; may be repeated", func(key, value string) {
		img.Labels[key] = value
	})
	pair("env", "`KEY=VALUE`: set an environment variable of the containers; may be repeated", func(key, value string) {
		img.Env = append(img.Env, key+"="+value)
	})
	flags.Func("dir", "`PATH`: add an empty directory; may be repeated", func(path string) error {
		img.Files = append(img.Files, ociimage.File{Path: path, Dir: true})
		return nil
	})
	flags.Func("entrypoint", "`WORD` of the image's entrypoint; may be repeated", func(word string) error {
		img.Entrypoint = append(img.Entrypoint, word)
		return nil
	})
	flags.Func("cmd", "`WORD` of the default arguments of the entrypoint; may be repeated", func(word string) error {
		img.Cmd = append(img.Cmd, word)
		return nil
	})
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 || *out == "" {
		return errors.New("-output is missing, or there are positional arguments")
	}
	// Write to another file and rename it, so that readers never see a partial archive.
	f, err := os.Create(*out + ".new")
	if err != nil {
		return err
	}
	if err := errors.Join(img.Write(f), f.Close()); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return os.Rename(f.Name(), *out)
}

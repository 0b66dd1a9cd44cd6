// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ociimage writes container images without a container engine.
//
// An image has one layer with the given files. It is an archive of an OCI image layout, which `ctr images import`,
// `podman load` and `skopeo` read. The same files always give the same bytes: the archive contains no times, owners
// or file orders of the build machine.
package ociimage

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"
)

// File is one file of an image, owned by root.
type File struct {
	// Path in the image, absolute. Parent directories are made with mode 0755.
	Path string
	// Source is the file with the content.
	Source string
	// Link makes the file a symbolic link with this target instead.
	Link string
	// Dir makes the file an empty directory instead.
	Dir bool
	// Mode defaults to 0755 if it is 0.
	Mode fs.FileMode
}

// Image is a container image for one architecture of Linux.
type Image struct {
	// Name is the reference under which a runtime stores the image, for example
	// "example.org/app:v1".
	Name string
	// Architecture in the spelling of GOARCH.
	Architecture string
	Files        []File
	// Entrypoint, default arguments, and environment variables KEY=VALUE of containers.
	Entrypoint, Cmd, Env []string
	// Labels of the image.
	Labels map[string]string
}

const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Platform    *platform         `json:"platform,omitempty"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type config struct {
	platform
	Config struct {
		Env        []string          `json:"Env,omitempty"`
		Entrypoint []string          `json:"Entrypoint,omitempty"`
		Cmd        []string          `json:"Cmd,omitempty"`
		Labels     map[string]string `json:"Labels,omitempty"`
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// Write writes the image as an archive of an OCI image layout.
func (img Image) Write(w io.Writer) error {
	if img.Name == "" || img.Architecture == "" {
		return errors.New("write image: no name or no architecture")
	}
	layer, diffID, err := img.layer()
	if err != nil {
		return fmt.Errorf("write image %s: %w", img.Name, err)
	}
	c := config{platform: platform{Architecture: img.Architecture, OS: "linux"}}
	c.Config.Env, c.Config.Entrypoint, c.Config.Cmd, c.Config.Labels = img.Env, img.Entrypoint, img.Cmd, img.Labels
	c.RootFS.Type, c.RootFS.DiffIDs = "layers", []string{diffID}

	out := archive{w: tar.NewWriter(w)}
	out.file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	m := manifest{
		SchemaVersion: 2, MediaType: typeManifest, Config: out.blob(typeConfig, encode(c)),
		Layers: []descriptor{out.blob(typeLayer, layer)},
	}
	d := out.blob(typeManifest, encode(m))
	d.Platform = &c.platform
	_, tag, _ := strings.Cut(img.Name[strings.LastIndex(img.Name, "/")+1:], ":")
	d.Annotations = map[string]string{
		"io.containerd.image.name": img.Name, "org.opencontainers.image.ref.name": cmp.Or(tag, "latest"),
	}
	out.file("index.json", encode(index{SchemaVersion: 2, MediaType: typeIndex, Manifests: []descriptor{d}}))
	if err := errors.Join(out.err, out.w.Close()); err != nil {
		return fmt.Errorf("write image %s: %w", img.Name, err)
	}
	return nil
}

// layer returns the compressed layer and the digest of its uncompressed content.
func (img Image) layer() (_ []byte, diffID string, _ error) {
	files, err := withParents(img.Files)
	if err != nil {
		return nil, "", err
	}
	var compressed bytes.Buffer
	z := gzip.NewWriter(&compressed)
	sum := sha256.New()
	t := tar.NewWriter(io.MultiWriter(z, sum))
	for _, f := range files {
		if err := f.write(t); err != nil {
			return nil, "", fmt.Errorf("%s: %w", f.Path, err)
		}
	}
	if err := errors.Join(t.Close(), z.Close()); err != nil {
		return nil, "", err
	}
	return compressed.Bytes(), "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
}

// withParents adds the parent directories of the files, and sorts all entries.
func withParents(files []File) ([]File, error) {
	all := map[string]File{}
	for _, f := range files {
		if !path.IsAbs(f.Path) || path.Clean(f.Path) != f.Path || f.Path == "/" {
			return nil, fmt.Errorf("%q is not a clean absolute path of a file", f.Path)
		}
		if _, twice := all[f.Path]; twice {
			return nil, fmt.Errorf("%s occurs twice", f.Path)
		}
		all[f.Path] = f
	}
	for _, f := range files {
		for dir := path.Dir(f.Path); dir != "/"; dir = path.Dir(dir) {
			if have, ok := all[dir]; ok && !have.Dir {
				return nil, fmt.Errorf("%s lies below %s, which is not a directory", f.Path, dir)
			}
			if _, ok := all[dir]; !ok {
				all[dir] = File{Path: dir, Dir: true}
			}
		}
	}
	sorted := make([]File, 0, len(all))
	for _, f := range all {
		sorted = append(sorted, f)
	}
	slices.SortFunc(sorted, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return sorted, nil
}

func (f File) write(t *tar.Writer) error {
	h := &tar.Header{
		Name: strings.TrimPrefix(f.Path, "/"), Mode: int64(cmp.Or(f.Mode, 0o755).Perm()),
		ModTime: time.Unix(0, 0), Format: tar.FormatPAX,
	}
	switch {
	case f.Dir:
		h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		return t.WriteHeader(h)
	case f.Link != "":
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, f.Link, 0o777
		return t.WriteHeader(h)
	}
	in, err := os.Open(f.Source)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file", f.Source)
	}
	h.Typeflag, h.Size = tar.TypeReg, info.Size()
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(t, in)
	return err
}

// archive is the outer archive. After the first error it writes nothing more.
type archive struct {
	w   *tar.Writer
	err error
}

func (a *archive) file(name string, content []byte) {
	if a.err == nil {
		a.err = a.w.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)),
			ModTime: time.Unix(0, 0), Format: tar.FormatPAX,
		})
	}
	if a.err == nil {
		_, a.err = a.w.Write(content)
	}
}

func (a *archive) blob(mediaType string, content []byte) descriptor {
	sum := sha256.Sum256(content)
	digest := hex.EncodeToString(sum[:])
	a.file("blobs/sha256/"+digest, content)
	return descriptor{MediaType: mediaType, Digest: "sha256:" + digest, Size: len(content)}
}

// encode cannot fail for the types above.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}
